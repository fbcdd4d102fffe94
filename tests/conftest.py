"""Fixtures that several kinds of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cp_shared_kv.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Four rank processes for the whole session; a call may use fewer of them."""
    with RankPool(4) as pool:
        yield pool
