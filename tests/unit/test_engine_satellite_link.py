"""The link between a satellite and the supervisor of its run, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cp_shared_kv._version import __version__
from cp_shared_kv.engine import home_link as module
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.guest_door import GuestDoor
from cp_shared_kv.engine.guests import Guests
from cp_shared_kv.engine.home_link import HomeLink, NobodyError
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp
from cp_shared_kv.engine.satellite_messages import Condemned, Join, Terms
from cp_shared_kv.errors import ConfigError, StartStoppedError, StartupError
from cp_shared_kv.testing.example_messages import ENGINE_MESSAGES

TERMS = next(message for message in ENGINE_MESSAGES if isinstance(message, Terms))
JOIN = Join(release=__version__, host="127.0.0.2", workers=1)
SERVER = ProcessUp(life="server-0.1", address="tcp://127.0.0.1:5000")
WORKER = ProcessUp(life="decode-1.1", address="tcp://127.0.0.2:4000")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ControlKeys:
    directory = tmp_path_factory.mktemp("cluster")
    ControlKeys.create(directory)
    return ControlKeys.load(directory)


class Run:
    """A supervisor's side."""

    def __init__(self, keys: ControlKeys) -> None:
        self.door = GuestDoor("127.0.0.1", 0, keys)
        self.guests = Guests(
            self.door,
            lambda lives: msgspec.structs.replace(TERMS, lives=lives),
            first_index=1,
            watchdog_seconds=60.0,
        )
        self.news: list[object] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def answer(self) -> None:
        """Hear satellites, in a thread."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.news += self.guests.exchange(time.monotonic())

    def pause(self) -> None:
        """Hear nobody any more; from now on the guests are the test's."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self.pause()
        self.guests.close("it was stopped")


@pytest.fixture
def run(keys: ControlKeys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr("cp_shared_kv.engine.guests.FAREWELL_SECONDS", 0.5)
    made = Run(keys)
    made.guests.tell(SERVER)
    made.answer()
    yield made
    made.close()


def joined(run: Run, keys: ControlKeys) -> HomeLink:
    link = HomeLink(run.door.address, keys)
    terms = link.ask(JOIN, threading.Event())
    assert terms.lives[0].startswith("decode-")
    return link


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def heard(link: HomeLink, least: int = 1) -> list[object]:
    """The next news, so many at least: each is a message of its own."""
    news: list[object] = []

    def has_come() -> bool:
        news.extend(link.exchange(time.monotonic()))
        return len(news) >= least

    until(has_come)
    return news


def test_a_satellite_joins_hears_and_is_heard(run: Run, keys: ControlKeys) -> None:
    link = joined(run, keys)
    assert heard(link) == [SERVER]
    assert link.known() == [SERVER]
    link.tell(WORKER)
    until(lambda: WORKER in run.news)
    run.pause()
    run.guests.gave_up(Life("decode", 1, 1), "out of reach")
    over = ProcessDown(life="server-0.1", reason="killed")
    run.guests.tell(over)
    assert heard(link, 2) == [
        Condemned(life="decode-1.1", reason="out of reach"),
        over,
    ]
    assert link.known() == []
    assert link.end is None
    link.close("done")


def test_a_satellite_that_leaves_is_heard_to_its_last_word(run: Run, keys: ControlKeys) -> None:
    link = joined(run, keys)
    link.tell(WORKER)
    link.close("the host goes down")
    until(lambda: len(run.news) == 2)
    told = run.news[1]
    assert isinstance(told, ProcessDown)
    assert told.final
    assert "the host goes down" in told.reason


def test_the_end_of_the_run_ends_the_session(run: Run, keys: ControlKeys) -> None:
    link = joined(run, keys)
    run.pause()
    closing = threading.Thread(target=run.guests.close, args=("it was stopped",))
    closing.start()

    def has_ended() -> bool:
        link.exchange(time.monotonic())
        return link.end is not None

    until(has_ended)
    assert link.end is not None
    assert (link.end.how, link.end.reason) == ("run over", "it was stopped")
    link.close("the run is over")
    closing.join()


def test_a_satellite_that_was_stopped_itself_does_not_take_its_run_for_silent(
    run: Run, keys: ControlKeys
) -> None:
    link = joined(run, keys)
    link.exchange(time.monotonic())
    run.pause()  # nothing more is on its way
    link.exchange(time.monotonic() + 10 * link.watchdog_seconds)
    assert link.end is None
    link.close("done")


@pytest.mark.parametrize("how", ["dismissed", "broken", "silent"])
def test_a_session_that_is_lost_may_be_followed_by_another(
    run: Run, keys: ControlKeys, how: str
) -> None:
    link = joined(run, keys)
    link.watchdog_seconds = 0.3 if how == "silent" else 60
    if how == "dismissed":
        link.tell(ProcessUp(life="decode-9.1", address="tcp://127.0.0.2:4000"))
    else:
        run.pause()
    if how == "broken":
        run.door.close()

    def has_ended() -> bool:
        link.exchange(time.monotonic())
        return link.end is not None

    until(has_ended)
    assert link.end is not None
    assert link.end.how == "lost"
    words = {"dismissed": "dismissed", "broken": "connection is lost", "silent": "silent for"}
    assert words[how] in link.end.reason
    link.close("lost")
    if how == "dismissed":
        joined(run, keys).close("done")


def test_a_refusal_has_its_reason(run: Run, keys: ControlKeys) -> None:
    link = HomeLink(run.door.address, keys)
    with pytest.raises(StartupError, match=r"refuses.*release 0\.0\.9") as refused:
        link.ask(msgspec.structs.replace(JOIN, release="0.0.9"), threading.Event())
    assert not isinstance(refused.value, NobodyError)  # it is of no use to ask again
    link.close("refused")


def test_other_keys_are_told_apart_from_silence_at_once(run: Run, tmp_path: Path) -> None:
    ControlKeys.create(tmp_path)
    link = HomeLink(run.door.address, ControlKeys.load(tmp_path))
    before = time.monotonic()
    with pytest.raises(NobodyError, match=r"with these keys.*--control-keys"):
        link.ask(JOIN, threading.Event())
    assert time.monotonic() - before < module.ANSWER_SECONDS
    link.close("no keys")


def test_nobody_is_asked_for_ever(keys: ControlKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)
    link = HomeLink("127.0.0.1:1", keys)
    with pytest.raises(NobodyError, match="firewall"):
        link.ask(JOIN, threading.Event())
    link.close("nobody")


def test_asking_stops_when_it_is_told_to(keys: ControlKeys) -> None:
    stop_asked = threading.Event()
    stop_asked.set()
    link = HomeLink("127.0.0.1:1", keys)
    with pytest.raises(StartStoppedError):
        link.ask(JOIN, stop_asked)
    link.close("stopped")


@pytest.mark.parametrize("address", ["nonsense", "host:port", ""])
def test_an_address_that_is_none_is_refused(keys: ControlKeys, address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        HomeLink(address, keys)
