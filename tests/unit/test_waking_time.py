"""Silence as somebody counts it who may have been stopped meanwhile."""

from __future__ import annotations

import pytest

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.batch_watchdog import BatchWatchdog
from cp_shared_kv.engine.waking_time import WakingTime
from cp_shared_kv.errors import CpkvError

BATCH = Batch(epoch=1, batch_id=7, token_ids=b"", requests=[])


def test_time_passes_as_it_does_for_others_while_its_owner_looks_often() -> None:
    waking = WakingTime(0.5)
    assert [waking.at(100.0 + n * 0.25) for n in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_pause_of_its_owner_counts_as_one_step() -> None:
    waking = WakingTime(0.5)
    waking.at(100.0)
    assert waking.at(100.25) == 0.25
    assert waking.at(1000.0) == 0.75
    assert waking.at(1000.25) == 1.0


def test_a_batch_that_does_not_end_is_named() -> None:
    watchdog = BatchWatchdog(3)
    for now in range(4):
        watchdog.look(BATCH, float(now))
    with pytest.raises(CpkvError, match=r"batch 7 .*4 s.*--watchdog-timeout 3"):
        watchdog.look(BATCH, 4.0)


def test_a_controller_that_was_stopped_itself_takes_no_batch_for_stuck() -> None:
    watchdog = BatchWatchdog(3)
    watchdog.look(BATCH, 0.0)
    watchdog.look(BATCH, 1.0)
    watchdog.look(BATCH, 1000.0)
    watchdog.look(BATCH, 1001.0)
    with pytest.raises(CpkvError):
        watchdog.look(BATCH, 1002.0)


def test_the_next_batch_has_its_own_time() -> None:
    watchdog = BatchWatchdog(3)
    other = Batch(epoch=1, batch_id=8, token_ids=b"", requests=[])
    for now in range(10):
        watchdog.look(BATCH if now % 4 < 2 else other, float(now))
    for now in range(10, 30):
        watchdog.look(None, float(now))
