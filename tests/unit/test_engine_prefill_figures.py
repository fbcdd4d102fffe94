"""What the prefill controller logs and tells of its pool, and a flush of it."""

from __future__ import annotations

import logging

import pytest

from cp_shared_kv.engine.messages import Flush, Flushed, PageMapRequest, ToldPageMap
from cp_shared_kv.testing.recorded_controller import EPOCH, PAGE_SIZE, Controller


def test_a_transfer_is_logged_by_rank_once_all_have_concluded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = Controller()
    batch = group.start(1)
    group.all_done(batch)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="cp_shared_kv"):
        group.conclude(1, 1)
        assert caplog.messages == []
        group.conclude(1, 0)
    assert caplog.messages == [
        "CP shared KV transfer: rank=0 sent pages=1 descriptors=3 bytes=100",
        "CP shared KV transfer: rank=1 sent pages=2 descriptors=3 bytes=101",
    ]


def test_a_failed_rank_is_not_logged_as_having_sent(caplog: pytest.LogCaptureFixture) -> None:
    group = Controller()
    batch = group.start(1)
    group.all_done(batch)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="cp_shared_kv"):
        group.conclude(1, 0)
        group.conclude(1, 1, failure="the wire broke")
    assert caplog.messages == [
        "CP shared KV transfer: rank=0 sent pages=1 descriptors=3 bytes=100",
        "CP shared KV transfer: rank=1 failed: the wire broke",
    ]


def test_the_figures_are_those_of_the_pool_and_the_ranks() -> None:
    group = Controller()
    stats = group.stats()
    assert (stats.ticket, stats.available_tokens, stats.locked_tokens) == (5, 40, 0)
    batch = group.start(1, tokens=8)
    group.submit(2)
    stats = group.stats()
    assert (stats.available_tokens, stats.cached_tokens, stats.locked_tokens) == (32, 0, 8)
    assert (stats.queued, stats.running) == (1, 1)
    assert stats.free_pages_per_owner == [4, 4]
    group.finish(batch, room=1)
    stats = group.stats()
    assert (stats.available_tokens, stats.cached_tokens, stats.locked_tokens) == (32, 8, 0)
    assert (stats.prompt_tokens_total, stats.cached_tokens_total) == (8, 0)
    assert stats.sent_pages_total == [1, 2]
    assert stats.sent_descriptors_total == [3, 3]
    assert stats.sent_bytes_total == [100, 101]
    assert stats.scratch_bytes == [10, 20]
    assert stats.read_bytes_total == [1000, 2000]


def test_a_flush_drops_what_no_request_uses_and_tells_how_much() -> None:
    group = Controller()
    batch = group.start(1, tokens=8)
    group.finish(batch, room=1)
    group.start(2, tokens=5)
    assert group.stats().cached_tokens == 4  # of the first request's two pages one is in use
    group.controller.on_server(Flush(ticket=9))
    assert group.taken(Flushed) == [Flushed(ticket=9, pages=1)]
    assert group.stats().cached_tokens == 0
    group.controller.on_server(Flush(ticket=10))
    assert group.taken(Flushed) == [Flushed(ticket=10, pages=0)]


def test_a_page_map_tells_each_owners_pages_by_state() -> None:
    group = Controller()
    batch = group.start(1, tokens=8)
    group.finish(batch, room=1)
    group.start(2, tokens=5)  # on a cached page of the first request, and one more
    group.controller.on_server(PageMapRequest(ticket=4, most_bins=2))
    (told,) = group.taken(ToldPageMap)
    assert (told.ticket, told.epoch) == (4, EPOCH)
    assert (told.physical_pages, told.pages_per_bin) == (5, 3)
    stats = group.stats()
    assert [sum(row) for row in told.free] == stats.free_pages_per_owner
    assert sum(map(sum, told.cached)) * PAGE_SIZE == stats.cached_tokens == 4
    held = 2 * 5 - sum(map(sum, told.free)) - sum(map(sum, told.cached))
    assert held * PAGE_SIZE == stats.locked_tokens == 8
