"""The pure functions that sparse attention is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionOps:
    """One implementation of DeepSeek sparse attention; n and m are at least 1.

    No function changes its arguments. HI, H: heads of the indexer and of MLA; dI, r, dr: widths.

    index_scores(q[n, HI, dI], head_weights fp32 [n, HI], keys[m, dI]) -> fp32 [n, m]
        I[t, s] = sum_h head_weights[t, h] * relu(q[t, h] . keys[s]), not masked. Of keys that are
        cut at multiples of PIECE_TOKENS the parts give the same bits as the whole.
    select_topk(scores fp32 [n, m], visible i64[n], k) -> i64 [n, min(k, m)]
        Per row the columns of the k best among the first `visible` (1..m) of them; among equal
        scores the lowest column. Ascending; a row with fewer visible columns has all of them,
        then -1.
    sparse_attention(q_latent[n, H, r], q_pe[n, H, dr], latent[n, k, r], k_pe[n, k, dr],
                     valid bool[n, k], scale) -> [n, H, r]
        Softmax of (q_latent . latent + q_pe . k_pe) * scale over each row's own k gathered
        rows, those that are not valid left out; then the mean of the latents by it. At least
        one row of the k is valid.
    attend_rows(q_latent[n, H, r], q_pe[n, H, dr], rows[*, r + dr], slots i64[n, k], scale)
                     -> [n, H, r] or None
        The same of rows[slots], those below 0 left out, for rows as they are stored; the first
        slot of each token is none of these. None where it does not take these widths or types.
        Where rows lie changes no bit, their order in `slots` may.
    index_scores_fp8(q[n, HI, dI], head_weights fp32[n, HI], codes u8[m, dI], scales fp32[m])
                     -> fp32 [n, m], contiguous in a row
        index_scores of keys that are stored as e4m3 with a scale each, with q rounded to e4m3 as
        well, one scale a head. Cut keys: as there.
    """

    index_scores: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    select_topk: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    sparse_attention: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor
    ]
    attend_rows: (
        Callable[
            [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor | None
        ]
        | None
    ) = None
    index_scores_fp8: (
        Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None
    ) = None
