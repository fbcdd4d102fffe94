"""Kernels that write rows leave the bytes that the page formats define, and no other byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalLocs
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.gpu_writes import store_index, store_latent
from cp_shared_kv.memory.page_format import IndexFormat, LatentFormat, PageFormat
from cp_shared_kv.memory.pool import WritePlan

POISON = 0xA5
PAGES, PAGE_SIZE = 9, 16
WIDTHS = [(512, 64), (256, 8), (384, 40)]


def make_values(tokens: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of every magnitude, blocks of zeros and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-60, 60, (tokens, width // 8), generator=generator)
    scale = 2.0 ** exponents.repeat_interleave(8, dim=1)
    values = torch.randn(tokens, width, generator=generator) * scale
    values[::5] = torch.randn(len(values[::5]), width, generator=generator)
    values[1::7] = 0
    values[2::7] *= 1e-35
    return values.to(dtype)


def make_plan(tokens: int, seed: int, owned: float = 0.5) -> WritePlan:
    """Some of the rows, to places in random order, none of them on the padding page."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.nonzero(torch.rand(tokens, generator=generator) < owned).flatten()
    places = torch.randperm((PAGES - 1) * PAGE_SIZE, generator=generator)[: len(rows)]
    return WritePlan(rows, places + PAGE_SIZE)


def check(
    page_format: PageFormat,
    encoded: torch.Tensor,
    plan: WritePlan,
    device: torch.device,
    store: Callable[[torch.Tensor, WritePlan], None],
) -> None:
    pages = torch.full((PAGES, page_format.page_bytes), POISON, dtype=torch.uint8, device=device)
    expected = torch.full_like(pages, POISON)
    placed = plan.to(device)
    page_format.scatter_rows(expected, placed.physical_locs, encoded[placed.rows])
    store(pages, placed)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("scale_kind", ["fp32", "power-of-two"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8_ds_mla"])
def test_latent_rows_are_those_of_the_format(
    device: torch.device,
    name: str,
    widths: tuple[int, int],
    dtype: torch.dtype,
    scale_kind: str,
) -> None:
    form = latent_format(
        name,
        kv_lora_rank=widths[0],
        qk_rope_head_dim=widths[1],
        page_size=PAGE_SIZE,
        scale_kind=scale_kind,
    )
    # Parts of wider rows, as a projection leaves them.
    joined = make_values(61, sum(widths) + 8, dtype, seed=widths[0]).to(device)
    latent, k_pe, _ = joined.split((*widths, 8), dim=1)
    check(
        form,
        form.encode(latent, k_pe),
        make_plan(61, seed=3),
        device,
        lambda pages, plan: store_latent(form, pages, latent, k_pe, plan),
    )


@pytest.mark.parametrize("scale_kind", ["fp32", "power-of-two"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8_scaled"])
def test_index_rows_are_those_of_the_format(
    device: torch.device, name: str, dtype: torch.dtype, scale_kind: str
) -> None:
    form = index_format(name, index_head_dim=128, page_size=PAGE_SIZE, scale_kind=scale_kind)
    index_k = make_values(77, 128, dtype, seed=5).to(device)
    check(
        form,
        form.encode(index_k),
        make_plan(77, seed=4),
        device,
        lambda pages, plan: store_index(form, pages, index_k, plan),
    )


def every_code() -> torch.Tensor:
    """Values at, just below and just above each e4m3, and halfway between two: [*, 128]."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    edges = torch.cat((codes, (codes[1:] + codes[:-1]) / 2))
    values = torch.cat(
        (edges, edges.nextafter(torch.tensor(999.0)), edges.nextafter(torch.tensor(-999.0)))
    )
    values = torch.cat((values, -values)).clamp(-448, 448)
    rows = -(-len(values) // 127)
    # 127 to a row, so that the largest e4m3 beside them sets the scale to one.
    padded = torch.zeros(rows, 128)
    padded[:, :127] = torch.nn.functional.pad(values, (0, rows * 127 - len(values))).view(-1, 127)
    padded[:, 127] = 448
    return padded


def test_every_rounding_to_e4m3_is_that_of_the_format(device: torch.device) -> None:
    form = index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE)
    index_k = every_code().to(device)
    plan = WritePlan(torch.arange(len(index_k)), torch.arange(len(index_k)) + PAGE_SIZE)
    check(
        form,
        form.encode(index_k),
        plan,
        device,
        lambda pages, plan: store_index(form, pages, index_k, plan),
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_makes_its_block_nan_and_no_other(
    device: torch.device, wrong: float
) -> None:
    form = latent_format("fp8_ds_mla", kv_lora_rank=256, qk_rope_head_dim=8, page_size=PAGE_SIZE)
    latent = make_values(3, 256, torch.float32, seed=1).to(device)
    k_pe = make_values(3, 8, torch.float32, seed=2).to(device)
    latent[1, 130] = wrong
    pages = torch.zeros(PAGES, form.page_bytes, dtype=torch.uint8, device=device)
    plan = WritePlan(torch.arange(3), torch.arange(3) + PAGE_SIZE).to(device)
    store_latent(form, pages, latent, k_pe, plan)
    rows = form.gather_rows(pages, plan.physical_locs)
    read, _ = form.decode(rows.cpu(), torch.float32)
    assert read[1, 128:].isnan().all()
    assert not read[1, :128].isnan().any()
    expected = form.encode(latent, k_pe)
    assert torch.equal(rows[::2], expected[::2])


@pytest.mark.parametrize("name", ["bf16", "fp8_ds_mla"])
def test_places_on_the_padding_page_are_not_written(device: torch.device, name: str) -> None:
    form = latent_format(name, kv_lora_rank=256, qk_rope_head_dim=8, page_size=PAGE_SIZE)
    latent = make_values(30, 256, torch.bfloat16, seed=1).to(device)
    k_pe = make_values(30, 8, torch.bfloat16, seed=2).to(device)
    plan = make_plan(30, seed=7)
    padded = plan.padded(30).to(device)
    assert len(padded.rows) == 30 > len(plan.rows)
    check(
        form,
        form.encode(latent, k_pe),
        plan,
        device,
        lambda pages, _: store_latent(form, pages, latent, k_pe, padded),
    )


def test_a_plan_of_a_layout_keeps_what_its_rank_owns(device: torch.device) -> None:
    form: LatentFormat = latent_format(
        "bf16", kv_lora_rank=512, qk_rope_head_dim=64, page_size=PAGE_SIZE
    )
    index: IndexFormat = index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE)
    layout = CpSharedKVLayout(PAGE_SIZE, 2, 1, physical_pages=PAGES - 1)
    locs = LogicalLocs(torch.arange(3 * PAGE_SIZE, 9 * PAGE_SIZE - 5).numpy())
    plan = WritePlan.build(layout, locs)
    latent = make_values(len(locs), 512, torch.bfloat16, seed=1).to(device)
    k_pe = make_values(len(locs), 64, torch.bfloat16, seed=2).to(device)
    check(
        form,
        form.encode(latent, k_pe),
        plan,
        device,
        lambda pages, plan: store_latent(form, pages, latent, k_pe, plan),
    )
    index_k = make_values(len(locs), 128, torch.bfloat16, seed=3).to(device)
    check(
        index,
        index.encode(index_k),
        plan,
        device,
        lambda pages, plan: store_index(index, pages, index_k, plan),
    )


def test_rows_of_a_rank_are_encoded_by_the_same_kernels(device: torch.device) -> None:
    latent_form = latent_format(
        "fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64, page_size=PAGE_SIZE
    )
    index_form = index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE)
    values = make_values(13, 704, torch.bfloat16, seed=9).to(device)
    latent, k_pe, index_k = values.split((512, 64, 128), dim=1)
    each = torch.arange(13, device=device)
    behind_padding = WritePlan(each, each + 1)
    rows = torch.full((14, 656), POISON, dtype=torch.uint8, device=device)
    store_latent(latent_form, rows, latent, k_pe, behind_padding, page_size=1)
    assert torch.equal(rows[1:], latent_form.encode(latent, k_pe))
    assert (rows[0] == POISON).all()
    rows = torch.full((14, 132), POISON, dtype=torch.uint8, device=device)
    store_index(index_form, rows, index_k, behind_padding, page_size=1)
    assert torch.equal(rows[1:], index_form.encode(index_k))
    assert (rows[0] == POISON).all()


def test_rows_that_no_kernel_can_write_are_refused(device: torch.device) -> None:
    form = latent_format("fp8_ds_mla", kv_lora_rank=256, qk_rope_head_dim=3, page_size=PAGE_SIZE)
    pages = torch.zeros(PAGES, form.page_bytes, dtype=torch.uint8, device=device)
    latent = torch.ones(3, 256, device=device)
    with pytest.raises(ConfigError, match="even number of rope dimensions"):
        store_latent(form, pages, latent, latent[:, :3], make_plan(3, seed=1).to(device))


def test_no_rows_write_nothing(device: torch.device) -> None:
    form = latent_format("fp8_ds_mla", kv_lora_rank=256, qk_rope_head_dim=8, page_size=PAGE_SIZE)
    pages = torch.full((PAGES, form.page_bytes), POISON, dtype=torch.uint8, device=device)
    none = torch.empty(0, dtype=torch.int64)
    latent = torch.ones(3, 256, device=device)
    store_latent(form, pages, latent, latent[:, :8], WritePlan(none, none).to(device))
    assert (pages == POISON).all()
