"""Stored rows of latent KV as attention kernels take them: bf16, latent and key side by side."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cp_shared_kv.memory.formats.fp8_ds_mla import Fp8DsMlaFormat

MOST_ROWS = 900_000
"""Decoded at once: 1 GB at 576 dimensions."""


def attendable_rows(
    page_format: Fp8DsMlaFormat,
    rows: torch.Tensor,
    places: torch.Tensor,
    *,
    most_rows: int = MOST_ROWS,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Decode by kernel what tokens attend to; the same bits as `decode` of the format.

    rows u8[*, row_bytes], contiguous; places i64[t, k] in them, below 0 for none. Gives some of
    the t tokens after the other: which, bf16[*, r + dr], and their places i64[n, k] in those. All
    rows are decoded once if they are no more than `most_rows` and than the places; else those of
    each place, of as many tokens at a time as keep to `most_rows`, but of one at least.
    """
    # Here, since without a GPU there need not be a triton.
    from cp_shared_kv.kernels.decode_rows import decode_fp8_latent

    tokens, k = places.shape
    latent, rope = page_format.kv_lora_rank, page_format.qk_rope_head_dim
    if len(rows) <= min(most_rows, places.numel()):
        yield slice(0, tokens), decode_fp8_latent(rows, None, latent, rope), places
        return
    at_once = max(1, most_rows // max(1, k))
    for start in range(0, tokens, at_once):
        part = slice(start, min(start + at_once, tokens))
        chosen = places[part]
        numbers = torch.arange(chosen.numel(), device=rows.device).view(chosen.shape)
        decoded = decode_fp8_latent(rows, chosen.flatten(), latent, rope)
        yield part, decoded, torch.where(chosen < 0, -1, numbers)
