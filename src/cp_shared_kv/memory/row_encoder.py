"""From the values of a batch's tokens to rows of bytes, by kernel where they are on a GPU."""

from __future__ import annotations

import torch

from cp_shared_kv.memory.gpu_writes import store_index, store_latent
from cp_shared_kv.memory.page_format import PageFormat
from cp_shared_kv.memory.pool import KVPoolSpec, WritePlan


class RowEncoder:
    """`encode` of a pool's formats for so many tokens; the same bytes on either path.

    On a GPU torch encodes a row of fp8_ds_mla in a dozen launches, a kernel in one.
    """

    def __init__(self, spec: KVPoolSpec, tokens: int, device: torch.device) -> None:
        self._spec = spec
        self._all: WritePlan | None = None
        if device.type == "cuda":
            # Rows are pages of one token, behind a padding page.
            each = torch.arange(tokens)
            self._all = WritePlan(each, each + 1).to(device)

    def latent(self, latent: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        """latent [T, kv_lora_rank], k_pe [T, qk_rope_head_dim], any float -> u8[T, row_bytes]."""
        if self._all is None:
            return self._spec.latent.encode(latent, k_pe)
        rows = self._empty(self._spec.latent, latent)
        store_latent(self._spec.latent, rows, latent, k_pe, self._all, page_size=1)
        return rows[1:]

    def index(self, index_k: torch.Tensor) -> torch.Tensor:
        """index_k [T, index_head_dim], any float -> u8[T, row_bytes]."""
        if self._all is None:
            return self._spec.index.encode(index_k)
        rows = self._empty(self._spec.index, index_k)
        store_index(self._spec.index, rows, index_k, self._all, page_size=1)
        return rows[1:]

    def _empty(self, page_format: PageFormat, values: torch.Tensor) -> torch.Tensor:
        shape = (len(values) + 1, page_format.row_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=values.device)
