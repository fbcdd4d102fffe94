"""A rank's links to decode workers: made beside its work, closed whenever the worker goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import zmq

from cp_shared_kv.engine import decode_links
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.decode_links import DecodeLinks
from cp_shared_kv.engine.off_host import OffHostDoor
from cp_shared_kv.engine.side_calls import run
from cp_shared_kv.testing.calls_at_once import CallsAtOnce
from cp_shared_kv.transfer.messages import Quiesced

IDENTITY = b"prefill-0.1/rank-0"
QUIESCED = Quiesced(epoch=1, peer_epoch=7, room=3, rank=0)


class CallsLater:
    """SideCalls that are made when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, call: Callable[[], Any], /) -> Future[Any]:
        self.waiting.append((call, Future()))
        return self.waiting[-1][1]

    def make(self) -> None:
        run(*self.waiting.pop(0))


class Ends:
    """A decode worker's door for this host and others, and a rank's links."""

    def __init__(self, directory: Path) -> None:
        ControlKeys.create(directory / "keys")
        keys = ControlKeys.load(directory / "keys")
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.local = f"ipc://{directory}/inbox.sock"
        self.socket.bind(self.local)
        self._door = OffHostDoor(self.socket, "127.0.0.2", 0, keys)
        self.abroad = self._door.address
        self.calls = CallsLater()
        self.answers: list[str | None] = []
        self.woken = 0
        self.links = DecodeLinks(IDENTITY, keys, self.calls, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def heard(self) -> bytes | None:
        return self.socket.recv_multipart()[0] if self.socket.poll(5000) else None

    def close_door(self) -> None:
        self.socket.close()

    def close(self) -> None:
        self.links.close(7)
        self.socket.close()
        self._door.close()
        self._context.term()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    ends = Ends(tmp_path)
    yield ends
    ends.close()


def test_a_link_on_this_host_stands_at_once_and_stays(ends: Ends) -> None:
    for _ in range(2):
        ends.links.open(7, ends.local, ends.answers.append)
    assert ends.answers == [None, None]
    assert len(ends.links.all()) == 1
    ends.links.post(QUIESCED)
    assert ends.heard() == IDENTITY
    assert ends.links.broken(lambda _: "unreachable") == []


def test_a_link_to_another_host_is_waited_for_elsewhere(ends: Ends) -> None:
    ends.links.open(7, ends.abroad, lambda _: ends.answers.append("the first to ask"))
    ends.links.open(7, ends.abroad, ends.answers.append)
    assert (ends.answers, ends.links.all()) == ([], [])
    ends.links.post(QUIESCED)  # to nobody yet
    ends.calls.make()
    assert (ends.woken, ends.answers) == (1, [])
    ends.links.collect()
    assert ends.answers == [None]
    ends.links.post(QUIESCED)
    assert ends.heard() == IDENTITY


def test_a_link_that_does_not_stand_in_time_is_answered_for(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_links, "CONTACT_SECONDS", 0.1)
    ends.close_door()
    ends.links.open(7, ends.abroad, ends.answers.append)
    ends.calls.make()
    ends.links.collect()
    assert "no connection to the address" in (ends.answers[0] or "")
    assert ends.links.all() == []


def test_an_address_that_is_none_is_answered_for(ends: Ends) -> None:
    ends.links.open(7, "nonsense", ends.answers.append)
    assert "an address that cannot be connected to: nonsense" in (ends.answers[0] or "")


@pytest.mark.parametrize("made_before", [True, False])
def test_a_worker_that_goes_while_its_link_is_made_leaves_none_behind(
    ends: Ends, made_before: bool
) -> None:
    made: list[zmq.Socket[bytes]] = []
    ends.links.open(7, ends.abroad, ends.answers.append)
    ends.calls.waiting[0][1].add_done_callback(lambda ended: made.append(ended.result()))
    if made_before:
        ends.calls.make()
    ends.links.close(7)
    if not made_before:
        ends.calls.make()
    ends.links.collect()
    assert made[0].closed
    assert (ends.answers, ends.links.all()) == ([], [])


def test_what_breaks_between_hosts_is_named_once(ends: Ends) -> None:
    links = ends.links
    links._calls = CallsAtOnce()
    links.open(7, ends.abroad, ends.answers.append)
    assert ends.answers == [None]
    assert links.broken(lambda _: None) == []
    assert links.broken(lambda epoch: f"a write to {epoch} broke") == [(7, "a write to 7 broke")]
    assert links.broken(lambda epoch: f"a write to {epoch} broke") == []
