"""Budgets into pages and tokens."""

from __future__ import annotations

from typing import Any

import pytest

from cp_shared_kv import KVCapacity
from cp_shared_kv.errors import CapacityError, LayoutError

# 78 layers of bf16 latent KV (1152 B) and fp8 index K (132 B a token).
BYTES_PER_TOKEN = 78 * (1152 + 132)
PAGE_BYTES = 64 * BYTES_PER_TOKEN
GIB = 2**30


def test_a_rank_of_the_production_model_holds_what_the_design_says() -> None:
    assert BYTES_PER_TOKEN == 100_152
    capacity = KVCapacity.from_budget(int(22.145 * GIB), PAGE_BYTES, page_size=64, cp_size=8)
    assert capacity.physical_tokens == 237_312
    assert capacity.logical_tokens == 1_898_496
    assert capacity.physical_pages == 3708
    assert capacity.logical_pages == 29_664
    used_bytes = capacity.physical_pages * PAGE_BYTES
    assert round(used_bytes / GIB, 3) == 22.135
    assert round((used_bytes + PAGE_BYTES) / GIB, 3) == 22.141


@pytest.mark.parametrize(
    ("budget_bytes", "stripe_pages", "pages"),
    [(200, 1, 1), (299, 1, 1), (300, 1, 2), (1099, 1, 9), (1099, 2, 8), (1099, 4, 8), (1000, 3, 9)],
)
def test_a_budget_pays_for_the_padding_page_and_whole_stripes(
    budget_bytes: int, stripe_pages: int, pages: int
) -> None:
    capacity = KVCapacity.from_budget(budget_bytes, 100, 64, 4, stripe_pages)
    assert capacity == KVCapacity(pages, 64, 4, stripe_pages)


@pytest.mark.parametrize(
    ("tokens", "stripe_pages", "pages"), [(64, 1, 1), (127, 1, 1), (640, 3, 9), (641, 4, 8)]
)
def test_a_token_limit_is_rounded_down_to_whole_stripes(
    tokens: int, stripe_pages: int, pages: int
) -> None:
    capacity = KVCapacity.from_tokens(tokens, 64, 4, stripe_pages)
    assert capacity == KVCapacity(pages, 64, 4, stripe_pages)
    assert capacity.physical_tokens == pages * 64


def test_a_budget_without_a_stripe_names_the_least_that_would_do() -> None:
    with pytest.raises(CapacityError, match="499 bytes; allowed: >= 500 bytes"):
        KVCapacity.from_budget(499, 100, 64, 4, stripe_pages=4)
    assert KVCapacity.from_budget(500, 100, 64, 4, stripe_pages=4).physical_pages == 4


def test_too_few_tokens_name_the_least_that_would_do() -> None:
    with pytest.raises(CapacityError, match="127; allowed: >= 128 tokens"):
        KVCapacity.from_tokens(127, 64, 4, stripe_pages=2)
    assert KVCapacity.from_tokens(128, 64, 4, stripe_pages=2).physical_pages == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0, 64, 4), "physical_pages is too small"),
        ((5, 64, 4, 2), "physical_pages is not a whole number of stripes"),
        ((4, 0, 4), "page_size is too small"),
        ((4, 64, 0), "cp_size is too small"),
        ((4, 64, 4, 0), "stripe_pages is too small"),
        ((4.0, 64, 4), "physical_pages is not a whole number"),
    ],
)
def test_wrong_sizes_are_refused_by_name(settings: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        KVCapacity(*settings)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ((22.5, 100), "budget_bytes is not a whole number"),
        ((-1, 100), "budget_bytes is too small"),
        ((1000, 0), "page_bytes is too small"),
    ],
)
def test_wrong_budgets_are_refused_by_name(budget: tuple[Any, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        KVCapacity.from_budget(*budget, page_size=64, cp_size=4)
