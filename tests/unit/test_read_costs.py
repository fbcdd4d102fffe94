"""Which way a batch is estimated to be read fastest, and that every rank estimates the same."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPoolSpec
from cp_shared_kv.reads.cheaper_read import CheaperRead
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan
from cp_shared_kv.reads.read_costs import (
    BatchReads,
    ModelReads,
    push_is_faster,
    sparse_seconds,
    whole_seconds,
)

PAGE_SIZE = 64
BF16 = ModelReads(
    layers=61,
    index_layers=61,
    page_size=PAGE_SIZE,
    row_bytes=1152,
    index_page_bytes=132 * PAGE_SIZE,
    topk=2048,
)
FP8 = replace(BF16, row_bytes=656)


def batch(prefix_tokens: int, new_tokens: int) -> BatchReads:
    """Half of it remote; new tokens of one rank."""
    pages = prefix_tokens // PAGE_SIZE
    return BatchReads(pages, pages // 2, new_tokens)


def test_a_push_is_faster_from_about_12_remote_megabytes() -> None:
    assert not push_is_faster(0)
    assert not push_is_faster(12.3e6)
    assert push_is_faster(12.6e6)


@pytest.mark.parametrize("model", [BF16, FP8])
@pytest.mark.parametrize(
    ("prefix_tokens", "new_tokens", "sparse"),
    [
        (1 << 13, 32, False),  # finding rows takes longer than reading all of them
        (1 << 13, 2048, False),
        (1 << 16, 1, False),  # asking for a few rows takes the host longer than asking for pages
        (1 << 18, 8, True),
        (1 << 17, 2048, False),  # they may select all of it
        (1 << 20, 32, True),
        (1 << 20, 256, True),
        (1 << 20, 2048, False),
    ],
)
def test_few_tokens_after_a_long_prefix_read_rows(
    model: ModelReads, prefix_tokens: int, new_tokens: int, sparse: bool
) -> None:
    sizes = batch(prefix_tokens, new_tokens)
    assert (sparse_seconds(model, sizes, None) < whole_seconds(model, sizes)) == sparse


def test_estimates_are_near_what_was_measured() -> None:
    """1 M bf16 by push: 1,645 us a layer, and index K 208 (docs/gpu/README.md)."""
    one_layer = replace(BF16, layers=1, index_layers=1)
    whole = whole_seconds(one_layer, batch(1 << 20, 64)) * 1e6
    assert whole == pytest.approx(1645 + 208, rel=0.03)
    # 64 tokens a rank select 126 thousand rows there, and never more than 131 thousand: 229 us.
    rows_alone = replace(one_layer, index_layers=0)
    sparse = sparse_seconds(rows_alone, batch(1 << 20, 64), None) * 1e6
    assert 229 < sparse < 1.4 * 229


def test_more_scratch_never_costs_time() -> None:
    sizes = batch(1 << 20, 256)
    costs = [sparse_seconds(BF16, sizes, most) for most in (32, 128, 1 << 10, 1 << 13, None)]
    assert costs == sorted(costs, reverse=True)


def test_without_an_index_only_rows_are_read() -> None:
    no_index = replace(BF16, index_layers=0)
    assert sparse_seconds(no_index, batch(1 << 17, 8), None) < sparse_seconds(
        BF16, batch(1 << 17, 8), None
    )


# The choice for a batch --------------------------------------------------------------------------

SPEC = KVPoolSpec(
    latent_format("bf16", kv_lora_rank=512, qk_rope_head_dim=64, page_size=PAGE_SIZE),
    index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE),
    num_layers=61,
    index_layers=tuple(range(61)),
)


def plan(cp_rank: int, prefix_tokens: int, cp_size: int = 2) -> ReadPlan:
    pages = LogicalPages(np.random.default_rng(0).permutation(prefix_tokens // PAGE_SIZE + 1) + 1)
    layout = CpSharedKVLayout(PAGE_SIZE, cp_size, cp_rank)
    return ReadPlan.build(layout, [BatchSpan(pages, prefix_tokens, 1)])


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("prefix_tokens", [0, 1 << 13, 1 << 17])
def test_all_ranks_choose_alike(cp_size: int, prefix_tokens: int) -> None:
    choice = CheaperRead(SPEC, 2048, None)
    for new_tokens in (1, 8, 64, 4096):
        chosen = {
            choice.is_sparse(plan(rank, prefix_tokens, cp_size), new_tokens)
            for rank in range(cp_size)
        }
        assert len(chosen) == 1


def test_a_prefix_that_scratch_does_not_hold_is_never_read_whole() -> None:
    assert not CheaperRead(SPEC, 2048, 1 << 17).is_sparse(plan(0, 1 << 17), 4096)
    assert CheaperRead(SPEC, 2048, (1 << 17) - PAGE_SIZE).is_sparse(plan(0, 1 << 17), 4096)
    assert not CheaperRead(SPEC, 2048, 4096).is_sparse(plan(0, 0), 4096)


def test_the_choice_and_both_estimates_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="cp_shared_kv")
    CheaperRead(SPEC, 2048, None).is_sparse(plan(0, 1 << 17), 8)
    CheaperRead(SPEC, 2048, 4096).is_sparse(plan(0, 1 << 17), 4096)
    few, blocks = (record.getMessage() for record in caplog.records)
    assert few.startswith("reads of 2048 prefix pages for 8 new tokens of a rank: sparse (")
    assert "by push, sparse" in few
    assert ": sparse (" in blocks
    assert "by push, which scratch does not hold, sparse" in blocks
