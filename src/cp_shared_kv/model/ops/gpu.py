"""Sparse attention on a GPU in bf16, index scores in e4m3: tensor cores, sums in fp32.

The rest of it, and all of a model that computes in fp32, is the reference, which runs on a GPU as
it is. No function's result depends on timing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.ops import reference
from cp_shared_kv.model.ops.interface import AttentionOps

_LEAST_WIDTH = 16
_LEAST_WIDTH_FP8 = 32
_MULTIPLIES_FP8 = (8, 9)
"""The compute capability from which on tensor cores take e4m3."""


def index_scores(q: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See AttentionOps. By kernel, for keys whose width is a power of two."""
    if q.dtype != torch.bfloat16 or not _suits_a_tile(keys.shape[1]):
        return reference.index_scores(q, head_weights, keys)
    # Here, since without a GPU there need not be a triton.
    from cp_shared_kv.kernels import index_scores as kernel

    return kernel.index_scores(q.contiguous(), head_weights.contiguous(), keys.contiguous())


def index_scores_fp8(
    q: torch.Tensor, head_weights: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """See AttentionOps. By kernel, where `gpu_ops` offers it."""
    from cp_shared_kv.kernels.index_scores import index_scores as kernel
    from cp_shared_kv.kernels.quantise_queries import quantise_queries

    q_codes, weights = quantise_queries(q.contiguous(), head_weights.contiguous())
    queries, keys = (part.view(torch.float8_e4m3fn) for part in (q_codes, codes))
    return kernel(queries, weights, keys, scales)


def select_topk(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """See AttentionOps. By kernel: one launch, and the host does not wait."""
    from cp_shared_kv.kernels import select_topk as kernel

    return kernel.select_topk(scores, visible, k)


def sparse_attention(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See AttentionOps, for rows that have to be decoded.

    Logits and softmax in fp32; the weights of the mean are rounded to bf16.
    """
    if q_latent.dtype != torch.bfloat16:
        return reference.sparse_attention(q_latent, q_pe, latent, k_pe, valid, scale)
    logits = torch.bmm(q_latent, latent.transpose(1, 2), out_dtype=torch.float32)
    logits += torch.bmm(q_pe, k_pe.transpose(1, 2), out_dtype=torch.float32)
    logits.mul_(scale).masked_fill_(~valid.unsqueeze(1), float("-inf"))
    return torch.bmm(logits.softmax(dim=-1).to(latent.dtype), latent)


def attend_rows(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor | None:
    """See AttentionOps. By kernel, for widths that are powers of two."""
    if not all(_suits_a_tile(width) for width in (q_latent.shape[2], q_pe.shape[2])):
        return None
    from cp_shared_kv.kernels import sparse_attention as kernel

    return kernel.sparse_attention(q_latent, q_pe, rows, slots.contiguous(), scale)


def _suits_a_tile(width: int) -> bool:
    return width >= _LEAST_WIDTH and width & (width - 1) == 0


_GPU_OPS = replace(
    reference.REFERENCE_OPS,
    index_scores=index_scores,
    select_topk=select_topk,
    sparse_attention=sparse_attention,
    attend_rows=attend_rows,
)


def gpu_ops(model: ModelConfig, device: torch.device) -> AttentionOps:
    """These, for a GPU and the widths of a model."""
    width = model.index_head_dim
    fits = _suits_a_tile(width) and width >= _LEAST_WIDTH_FP8
    if fits and torch.cuda.get_device_capability(device) >= _MULTIPLIES_FP8:
        return replace(_GPU_OPS, index_scores_fp8=index_scores_fp8)
    return _GPU_OPS
