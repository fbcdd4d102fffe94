"""Satellites as the supervisor of a run knows them: who may join, who is up, and who is gone."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest

from cp_shared_kv._version import __version__
from cp_shared_kv.engine import guests as module
from cp_shared_kv.engine.codecs import FROM_SATELLITE, ToSatellite
from cp_shared_kv.engine.guests import Guests
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp
from cp_shared_kv.engine.satellite_messages import (
    Condemned,
    Dismissed,
    Join,
    Leave,
    Refused,
    RunOver,
    StillHere,
    Terms,
)
from cp_shared_kv.testing.example_messages import ENGINE_MESSAGES

TERMS = next(message for message in ENGINE_MESSAGES if isinstance(message, Terms))
WATCHDOG = 10.0
LOOK_SECONDS = 0.125
A, B = b"satellite-a", b"satellite-b"


class FakeDoor:
    """Connections as lists."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[bytes, bytes]] = deque()
        self.sent: dict[bytes, list[ToSatellite]] = {}
        self.broken: set[bytes] = set()
        self.closed = False

    def receive(self, wait_seconds: float = 0.0) -> tuple[bytes, bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, satellite: bytes, message: ToSatellite) -> bool:
        if satellite not in self.broken and not isinstance(message, StillHere):
            self.sent.setdefault(satellite, []).append(message)
        return satellite not in self.broken

    def close(self) -> None:
        self.closed = True


class Run:
    """A supervisor's view."""

    def __init__(self) -> None:
        self.door = FakeDoor()
        self.guests = Guests(
            self.door,
            lambda lives: msgspec.structs.replace(TERMS, lives=lives),
            first_index=2,
            watchdog_seconds=WATCHDOG,
        )
        self.now = 100.0

    def says(self, who: bytes, *messages: Any) -> list[Any]:
        """What there is to tell when a satellite says this."""
        for message in messages:
            data = message if isinstance(message, bytes) else FROM_SATELLITE.encode(message)
            self.door.inbox.append((who, data))
        return list(self.guests.exchange(self.now))

    def pass_by(self, seconds: float) -> list[Any]:
        """What there is to tell of a time in which the supervisor looks as often as it does."""
        news: list[Any] = []
        for _ in range(int(seconds / LOOK_SECONDS)):
            self.now += LOOK_SECONDS
            news += self.guests.exchange(self.now)
        return news

    def told(self, who: bytes) -> list[ToSatellite]:
        return self.door.sent.pop(who, [])

    def join(self, who: bytes, host: str = "10.0.0.6", workers: int = 1) -> tuple[str, ...]:
        assert self.says(who, Join(release=__version__, host=host, workers=workers)) == []
        terms = self.told(who)[0]
        assert isinstance(terms, Terms)
        return terms.lives


def up(life: str, host: str = "10.0.0.6", port: int = 4000) -> ProcessUp:
    return ProcessUp(life=life, address=f"tcp://{host}:{port}")


def down(life: str, reason: str = "killed") -> ProcessDown:
    return ProcessDown(life=life, reason=reason)


def test_names_never_clash() -> None:
    run = Run()
    assert run.join(A, workers=2) == ("decode-2.1", "decode-3.1")
    assert run.join(B, host="10.0.0.7") == ("decode-4.1",)
    run.says(A, Leave(reason="over"))
    assert run.join(A) == ("decode-5.1",)  # it comes back under another name


def test_lives_that_come_and_go_are_told_like_those_of_this_host() -> None:
    run = Run()
    run.join(A)
    assert run.says(A, up("decode-2.1")) == [up("decode-2.1")]
    assert run.guests.known() == [up("decode-2.1")]
    assert run.says(A, down("decode-2.1")) == [down("decode-2.1")]
    assert run.guests.known() == []
    assert run.says(A, up("decode-2.2", port=4001)) == [up("decode-2.2", port=4001)]


def test_a_life_that_ended_before_it_was_up_is_no_news() -> None:
    run = Run()
    run.join(A)
    assert run.says(A, down("decode-2.1"), down("decode-2.2")) == []
    assert run.says(A, up("decode-2.3")) == [up("decode-2.3")]


def test_a_guest_cannot_say_that_its_unit_is_over_for_good() -> None:
    run = Run()
    run.join(A)
    run.says(A, up("decode-2.1"))
    (told,) = run.says(A, ProcessDown(life="decode-2.1", reason="killed", final=True))
    assert not told.final


def test_a_satellite_hears_of_the_server_and_the_groups_and_not_of_other_decode_workers() -> None:
    run = Run()
    server = ProcessUp(life="server-0.1", address="tcp://10.0.0.5:5000")
    run.guests.tell(server)
    run.join(A)
    run.door.sent.clear()
    run.join(B)
    run.guests.tell(down("prefill-0.1"))
    run.guests.tell(down("decode-0.1"))
    assert run.told(A) == [down("prefill-0.1")]
    run.guests.tell(down("server-0.1"))
    assert run.told(A) == [down("server-0.1")]
    run.says(b"late", Join(release=__version__, host="10.0.0.8", workers=1))
    assert len(run.told(b"late")) == 1  # the terms: no server is up


def test_whoever_joins_hears_of_the_server_that_is_up() -> None:
    run = Run()
    server = ProcessUp(life="server-0.2", address="tcp://10.0.0.5:5000")
    run.guests.tell(server)
    run.says(A, Join(release=__version__, host="10.0.0.6", workers=1))
    assert run.told(A)[1:] == [server]


@pytest.mark.parametrize(
    ("how", "reason"),
    [("silent", "silent for 10 s"), ("broken", "connection is lost"), ("leaves", "stopped")],
)
def test_a_satellite_that_is_gone_takes_its_lives_along(how: str, reason: str) -> None:
    run = Run()
    run.join(A, workers=3)
    run.join(B, host="10.0.0.7")
    run.says(A, up("decode-2.1"), up("decode-3.1"), down("decode-3.1"), up("decode-3.2"))
    run.says(A, down("decode-3.2"))  # decode-3 is between two lives, decode-4 has had none
    run.says(B, up("decode-5.1", host="10.0.0.7"))
    run.pass_by(WATCHDOG - 1)
    run.says(B, StillHere())
    if how == "silent":
        news = run.pass_by(2)
        assert isinstance(run.told(A)[-1], Dismissed)
    elif how == "broken":
        run.says(A, StillHere())
        run.door.broken.add(A)
        run.now += 1.0
        news = run.says(B, StillHere())
    else:
        news = run.says(A, Leave(reason="stopped"))
    assert [(n.life, n.final) for n in news] == [("decode-2.1", True), ("decode-3.2", True)]
    assert all(reason in n.reason and "10.0.0.6" in n.reason for n in news)
    assert run.guests.known() == [up("decode-5.1", host="10.0.0.7")]
    assert run.says(B, StillHere()) == []


def test_a_supervisor_that_was_stopped_itself_takes_no_satellite_for_silent() -> None:
    run = Run()
    run.join(A)
    run.says(A, up("decode-2.1"))
    run.now += 10 * WATCHDOG
    assert run.says(A) == []  # what it said meanwhile has not been delivered yet
    assert run.says(A, StillHere()) == []
    assert run.guests.known() == [up("decode-2.1")]


def test_what_a_gone_satellite_still_says_is_not_believed() -> None:
    run = Run()
    run.join(A)
    run.says(A, up("decode-2.1"))
    run.pass_by(WATCHDOG + 1)
    run.told(A)
    assert run.says(A, StillHere(), up("decode-2.2")) == []
    assert all(isinstance(message, Dismissed) for message in run.told(A))
    assert run.guests.known() == []


@pytest.mark.parametrize(
    "message",
    [
        up("decode-3.1"),  # another's
        up("decode-0.1"),  # of the run's own host
        up("prefill-0.1"),
        up("decode-2.1"),  # up already
        up("decode-2.2"),  # while another life is up
        down("decode-2.2"),
        down("decode-0.1"),
        down("server-0.1"),
        ProcessUp(life="decode-2.1/rank-0", address="tcp://10.0.0.6:4000"),
        Join(release=__version__, host="10.0.0.6", workers=1),
        b"",
        b"\xc1",
        b"\x81\xa4type\xa3tag",
    ],
    ids=repr,
)
def test_a_satellite_that_speaks_of_what_is_not_its_own_is_dismissed(message: Any) -> None:
    run = Run()
    run.join(A)
    run.join(B, host="10.0.0.7")
    run.says(A, up("decode-2.1"))
    news = run.says(A, message)
    assert [(n.life, n.final) for n in news] == [("decode-2.1", True)]
    assert isinstance(run.told(A)[-1], Dismissed)
    run.told(B)
    assert run.says(B, up("decode-3.1", host="10.0.0.7")) == [up("decode-3.1", host="10.0.0.7")]


@pytest.mark.parametrize(
    "address",
    [
        "tcp://10.0.0.7:4000",
        "tcp://10.0.0.6:0",
        "tcp://10.0.0.6:123456",
        "tcp://10x0y0z6:4000",
        "tcp://10.0.0.6:4000;tcp://10.0.0.7:1",
        "ipc:///run/decode.sock",
    ],
)
def test_an_address_of_another_host_is_not_passed_on(address: str) -> None:
    run = Run()
    run.join(A)
    assert run.says(A, ProcessUp(life="decode-2.1", address=address)) == []
    assert isinstance(run.told(A)[-1], Dismissed)


def test_another_release_is_refused_with_both() -> None:
    run = Run()
    run.says(A, Join(release="0.0.9", host="10.0.0.6", workers=1))
    (refused,) = run.told(A)
    assert isinstance(refused, Refused)
    assert "0.0.9" in refused.reason
    assert __version__ in refused.reason
    assert run.join(B) == ("decode-2.1",)  # a refusal takes no name


def test_more_guests_than_there_may_be_are_refused() -> None:
    run = Run()
    run.join(A, workers=60)
    run.says(B, Join(release=__version__, host="10.0.0.7", workers=5))
    (refused,) = run.told(B)
    assert isinstance(refused, Refused)
    assert "4 more" in refused.reason
    assert len(run.join(B, workers=4)) == 4


def test_when_no_names_are_left_nobody_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_INDEX", 3)
    run = Run()
    assert run.join(A, workers=2) == ("decode-2.1", "decode-3.1")
    run.says(B, Join(release=__version__, host="10.0.0.7", workers=1))
    assert isinstance(run.told(B)[0], Refused)


def test_a_life_that_a_group_gives_up_is_replaced_by_its_satellite() -> None:
    run = Run()
    run.join(A)
    run.says(A, up("decode-2.1"))
    run.guests.gave_up(Life("decode", 2, 1), "out of reach")
    assert run.told(A) == [Condemned(life="decode-2.1", reason="out of reach")]
    run.guests.gave_up(Life("decode", 2, 2), "another life")
    run.guests.gave_up(Life("decode", 0, 1), "of this host")
    assert run.told(A) == []


def test_the_end_of_the_run_is_told_and_awaited() -> None:
    run = Run()
    run.join(A)
    run.join(B)
    run.door.broken.add(B)
    run.door.inbox += [
        (A, FROM_SATELLITE.encode(StillHere())),
        (A, b"\xc1"),
        (A, FROM_SATELLITE.encode(Leave(reason="the run is over"))),
    ]
    run.guests.close("it was stopped")
    assert run.told(A) == [RunOver(reason="it was stopped")]
    assert run.door.inbox == deque()
    assert run.door.closed


def test_a_satellite_that_does_not_leave_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FAREWELL_SECONDS", 0.05)
    run = Run()
    run.join(A)
    run.guests.close("it was stopped")
    assert run.door.closed
