"""Owner-only writes on a GPU: one launch a kind of page, from values to the bytes of the format.

The same bytes as `encode` followed by `KVPool.write`, without the rows in between.
"""

from __future__ import annotations

import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.formats.fp8_ds_mla import Fp8DsMlaFormat
from cp_shared_kv.memory.formats.fp8_scaled import Fp8ScaledFormat
from cp_shared_kv.memory.formats.plain import PlainIndexFormat, PlainLatentFormat
from cp_shared_kv.memory.page_format import IndexFormat, LatentFormat, PageFormat
from cp_shared_kv.memory.pool import KVPoolSpec, WritePlan


def store_latent(
    page_format: LatentFormat,
    pages: torch.Tensor,
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    plan: WritePlan,
    *,
    page_size: int | None = None,
) -> None:
    """Keep the owned ones of the batch's rows in pages u8[*, page_bytes]. Never waits for the GPU.

    latent [T, kv_lora_rank] and k_pe [T, qk_rope_head_dim], any float; all tensors, the plan's
    too, on one device. page_size: of these pages, if it is not the format's. ConfigError for a
    format without a kernel.
    """
    # Here, since without a GPU there need not be a triton.
    from cp_shared_kv.kernels import store_rows

    rows, places = plan.rows, plan.physical_locs
    size = page_format.page_size if page_size is None else page_size
    match page_format:
        case PlainLatentFormat(stored=stored):
            parts = [latent.to(stored), k_pe.to(stored)]
            store_rows.store_plain(pages, size, parts, rows, places)
        case Fp8DsMlaFormat(scale_kind=scale_kind) if page_format.row_bytes % 4 == 0:
            store_rows.store_fp8_latent(
                pages,
                size,
                latent,
                k_pe.bfloat16(),
                rows,
                places,
                power_of_two=scale_kind == "power-of-two",
            )
        case _:
            raise _without_kernel(page_format)


def store_index(
    page_format: IndexFormat,
    pages: torch.Tensor,
    index_k: torch.Tensor,
    plan: WritePlan,
    *,
    page_size: int | None = None,
) -> None:
    """As `store_latent`, for index_k [T, index_head_dim]."""
    from cp_shared_kv.kernels import store_rows

    rows, places = plan.rows, plan.physical_locs
    size = page_format.page_size if page_size is None else page_size
    match page_format:
        case PlainIndexFormat(stored=stored):
            store_rows.store_plain(pages, size, [index_k.to(stored)], rows, places)
        case Fp8ScaledFormat(scale_kind=scale_kind):
            store_rows.store_fp8_index(
                pages, size, index_k, rows, places, power_of_two=scale_kind == "power-of-two"
            )
        case _:
            raise _without_kernel(page_format)


def check_kernels(spec: KVPoolSpec) -> None:
    """ConfigError unless there is a kernel for each of the pool's formats."""
    latent = spec.latent
    if isinstance(latent, Fp8DsMlaFormat) and latent.row_bytes % 4:
        raise _without_kernel(latent)


def _without_kernel(page_format: PageFormat) -> ConfigError:
    return ConfigError(
        "page format without a kernel that writes it",
        value=f"{page_format.name}, {page_format.row_bytes} bytes a row",
        allowed="fp32, bf16, fp8_scaled, and fp8_ds_mla with an even number of rope dimensions",
    )
