"""The loop of a rank's process: what it attends to first."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import zmq

from cp_shared_kv.engine import worker
from cp_shared_kv.engine.lives import Life


class EndOfTestError(Exception):
    """Ends the loop."""


class Link:
    """A decode worker's link with messages that have arrived."""

    def __init__(self, arrived: list[bytes]) -> None:
        self.arrived = arrived

    def poll(self, timeout: float) -> bool:
        assert timeout == 0
        return bool(self.arrived)

    def recv(self) -> bytes:
        return self.arrived.pop(0)


def run(monkeypatch: pytest.MonkeyPatch, links: list[Link]) -> list[str]:
    """What the loop does after a batch that took longer than it waits for acknowledgements."""
    done: list[str] = []
    rank = MagicMock()
    rank.decodes.all.return_value = links
    rank.on_decode.side_effect = lambda data: done.append(data.decode())
    rank.look_after_transfers.side_effect = lambda: done.append("look")
    for name in ("set_up_device", "describe_model", "load_transformer", "make_group"):
        monkeypatch.setattr(worker, name, MagicMock(return_value=(None, None)))
    monkeypatch.setattr(worker, "require_same_ops", MagicMock())
    monkeypatch.setattr(worker, "RankWorker", MagicMock(return_value=rank))
    clock = MagicMock()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(worker, "time", clock)
    turns = 0

    def select(waits: list[Any], *_others: object, timeout: float) -> tuple[list[Any], ...]:
        nonlocal turns
        turns += 1
        if turns > 1:
            raise EndOfTestError
        clock.monotonic.return_value += 10 * timeout
        return [wait for wait in waits if isinstance(wait, Link) and wait.arrived], [], []

    monkeypatch.setattr(zmq, "select", select)
    with pytest.raises(EndOfTestError):
        worker.run(MagicMock(), Life("prefill", 0, 1), 0, MagicMock())
    return done


def test_answers_that_came_during_a_batch_are_heard_before_they_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = [Link([b"a", b"b"]), Link([]), Link([b"c"])]
    assert run(monkeypatch, links) == ["a", "b", "c", "look"]


def test_a_decode_worker_that_does_not_stop_talking_keeps_nobody_waiting_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "MOST_ANSWERS", 2)
    links = [Link([b"a"] * 5), Link([b"c"])]
    assert run(monkeypatch, links) == ["a", "a", "c", "look"]
