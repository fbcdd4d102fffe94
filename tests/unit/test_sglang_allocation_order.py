"""The order in which pages come off a free list: owners in turn, and every page in the end."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_shared_kv.integrations.sglang.allocation_order import (
    owners_of,
    preferred_first,
    wanted_owners,
)


def test_owners_take_turns_from_the_last_page_on() -> None:
    free_pages = torch.arange(1, 17)
    last_pages = torch.tensor([0, 6, 0])  # page 6 is owner 1's, of 4

    wanted = wanted_owners(free_pages, last_pages, [False, True, False], [3, 4, 2], 4)

    assert wanted.tolist() == [0, 1, 2, 2, 3, 0, 1, 3, 0]


def test_a_new_request_begins_at_the_owner_with_most_free_pages() -> None:
    free_pages = torch.tensor([1, 2, 3, 7])  # owner 2 has two of them

    assert wanted_owners(free_pages, torch.zeros(1).long(), [False], [2], 4).tolist() == [2, 3]


def test_what_is_wanted_comes_first_and_the_rest_keeps_its_order() -> None:
    free_pages = torch.tensor([9, 1, 2, 5, 4, 3])

    ordered = preferred_first(free_pages, torch.tensor([2, 3, 0]), 4)

    assert ordered.tolist() == [3, 4, 9, 1, 2, 5]


def test_any_page_stands_in_for_an_owner_without_pages() -> None:
    free_pages = torch.tensor([1, 5, 9, 2])  # three of owner 0, one of owner 1

    ordered = preferred_first(free_pages, torch.tensor([1, 2, 3]), 4)

    assert ordered.tolist() == [2, 1, 5, 9]


@given(
    pages=st.lists(st.integers(1, 200), min_size=1, max_size=60, unique=True),
    cp_size=st.integers(1, 8),
    data=st.data(),
)
def test_nothing_is_lost_and_each_owner_is_served_as_far_as_it_goes(pages, cp_size, data) -> None:
    wanted = data.draw(st.lists(st.integers(0, cp_size - 1), max_size=len(pages)))
    free_pages = torch.tensor(pages)

    ordered = preferred_first(free_pages, torch.tensor(wanted, dtype=torch.int64), cp_size)

    assert sorted(ordered.tolist()) == sorted(pages)
    chosen = owners_of(ordered[: len(wanted)], cp_size).tolist()
    free_owners = owners_of(free_pages, cp_size).tolist()
    for owner in range(cp_size):
        served = sum(w == owner == c for w, c in zip(wanted, chosen, strict=True))
        assert served == min(wanted.count(owner), free_owners.count(owner))
