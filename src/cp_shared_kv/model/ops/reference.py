"""Sparse attention in plain torch, in fp32 inside whatever the dtype outside."""

from __future__ import annotations

import torch

from cp_shared_kv.model.ops.interface import AttentionOps
from cp_shared_kv.reads.piece_size import PIECE_TOKENS

# Products of one tile: small enough for a core's cache, large enough to amortise a call.
_TILE_PRODUCTS = 1 << 20
_LEAST_TILE_KEYS = 256


def index_scores(q: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See AttentionOps. Keys go by tiles, so that the products of all heads stay in cache."""
    rows, heads, width = q.shape
    count = keys.shape[0]
    scores = torch.empty(rows, count, dtype=torch.float32, device=q.device)
    flat_q, keys = q.reshape(rows * heads, width).float(), keys.float()
    weights = head_weights.unsqueeze(1)
    tile = min(_tile_keys(rows * heads), count)
    buffer = torch.empty(rows * heads * tile, dtype=torch.float32, device=q.device)
    for start in range(0, count, tile):
        part = keys[start : start + tile]
        products = buffer[: rows * heads * len(part)].view(rows * heads, len(part))
        torch.mm(flat_q, part.t(), out=products).relu_()
        by_head = products.view(rows, heads, len(part))
        scores[:, start : start + tile] = torch.bmm(weights, by_head).squeeze(1)
    return scores


def _tile_keys(products_of_key: int) -> int:
    # A power of two, and so a part of a piece: where keys are cut must not change their scores.
    largest = 1 << (max(1, _TILE_PRODUCTS // products_of_key).bit_length() - 1)
    return min(max(_LEAST_TILE_KEYS, largest), PIECE_TOKENS)


def select_topk(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """See AttentionOps. Exact and deterministic without a full sort.

    torch.topk may take any of several equal scores. Only at the threshold, the k-th best score,
    does that matter: one more value than asked for shows whether the tie crosses it.
    """
    count = scores.shape[1]
    seen = visible.unsqueeze(1)
    first = torch.arange(min(count, k), device=scores.device)
    all_seen = torch.where(first < seen, first, -1)
    if count <= k:
        return all_seen
    masked = _visible_only(scores, visible)
    best = masked.topk(k + 1, dim=1)
    chosen = best.indices[:, :k]
    tied = (best.values[:, k - 1] == best.values[:, k]) & (visible > k)
    rows = tied.nonzero().flatten()
    if len(rows):
        chosen[rows] = _lowest_of_tied(masked[rows], best.values[rows, k - 1 : k], k)
    chosen = chosen.sort(dim=1).values
    return torch.where(seen > k, chosen, all_seen)


def _visible_only(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    count = scores.shape[1]
    # On a GPU the host would have to wait for it, which costs more than hiding in all columns.
    least = 0 if scores.is_cuda else int(visible.min())
    if least == count:
        return scores
    hidden = torch.arange(least, count, device=scores.device) >= visible.unsqueeze(1)
    masked = scores.clone()
    masked[:, least:].masked_fill_(hidden, float("-inf"))
    return masked


def _lowest_of_tied(rows: torch.Tensor, threshold: torch.Tensor, k: int) -> torch.Tensor:
    """For each row all columns above its threshold, then the lowest of those at it, k in all."""
    above = ~(rows <= threshold)  # NaN is above all, as it is to topk
    at_threshold = rows == threshold
    wanted = k - above.sum(dim=1, keepdim=True)
    lowest = at_threshold.cumsum(dim=1, dtype=torch.int32) <= wanted
    return (above | (at_threshold & lowest)).nonzero()[:, 1].view(-1, k)


def sparse_attention(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See AttentionOps. Absorbed MLA: one key of r + dr and one value of r for all heads."""
    values = latent.float()
    logits = torch.bmm(q_pe.float(), k_pe.float().transpose(1, 2))
    logits = torch.baddbmm(logits, q_latent.float(), values.transpose(1, 2))
    logits = (logits * scale).masked_fill_(~valid.unsqueeze(1), float("-inf"))
    return torch.bmm(logits.softmax(dim=-1), values).to(q_latent.dtype)


REFERENCE_OPS = AttentionOps(index_scores, select_topk, sparse_attention)
