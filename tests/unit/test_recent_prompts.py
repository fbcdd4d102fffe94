"""The prompts of the last minute: growth of totals, group by group."""

from __future__ import annotations

from cp_shared_kv.engine.api import PrefillGroupStats
from cp_shared_kv.engine.recent_prompts import WINDOW_SECONDS, RecentPrompts


def group(index: int, prompt: int, cached: int) -> PrefillGroupStats:
    return PrefillGroupStats(
        index=index,
        available_tokens=0,
        cached_tokens=0,
        locked_tokens=0,
        free_pages_per_owner=(),
        queued_requests=0,
        running_requests=0,
        prompt_tokens_total=prompt,
        cached_tokens_total=cached,
        evicted_tokens_total=0,
        sent_pages_total=(),
        sent_descriptors_total=(),
        sent_bytes_total=(),
        read_bytes_total=(),
        scratch_bytes=(),
    )


def test_nothing_is_known_before_the_second_look() -> None:
    recent = RecentPrompts()
    assert recent.tokens() == (0, 0)
    recent.observe([group(0, 500, 100)], 0.0)
    assert recent.tokens() == (0, 0)
    recent.observe([group(0, 600, 150)], 1.0)
    assert recent.tokens() == (100, 50)


def test_what_is_older_than_the_window_does_not_count() -> None:
    recent = RecentPrompts()
    for second in range(100):
        recent.observe([group(0, 10 * second, second)], float(second))
    assert recent.tokens() == (10 * WINDOW_SECONDS, WINDOW_SECONDS)


def test_after_a_pause_only_the_youngest_of_the_old_totals_counts() -> None:
    recent = RecentPrompts()
    recent.observe([group(0, 0, 0)], 0.0)
    recent.observe([group(0, 100, 10)], 10.0)
    recent.observe([group(0, 130, 20)], 1000.0)
    assert recent.tokens() == (30, 10)


def test_a_group_that_is_missing_for_a_while_takes_nothing_back() -> None:
    recent = RecentPrompts()
    recent.observe([group(0, 100, 10), group(1, 1000, 0)], 0.0)
    recent.observe([group(0, 150, 20)], 1.0)
    assert recent.tokens() == (50, 10)
    recent.observe([group(0, 150, 20), group(1, 1100, 5)], 2.0)
    assert recent.tokens() == (150, 15)
