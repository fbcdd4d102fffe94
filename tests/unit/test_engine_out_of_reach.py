"""Links to other hosts that break: who gives whom up, and when a joined worker ends itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from cp_shared_kv.engine import joined_worker as joined_module
from cp_shared_kv.engine import out_of_reach as module
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.joined_worker import JoinedWorker
from cp_shared_kv.engine.links import DecodeLink, dealer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.off_host import OffHostDoor, is_lost
from cp_shared_kv.engine.out_of_reach import OutOfReach
from cp_shared_kv.errors import CpkvError

GROUP, DECODE, SERVER = Life("prefill", 0, 1), Life("decode", 1, 1), Life("server", 0, 1)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ControlKeys:
    directory = tmp_path_factory.mktemp("cluster")
    ControlKeys.create(directory)
    return ControlKeys.load(directory)


class Remote:
    """A process on another host."""

    def __init__(self, keys: ControlKeys) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._door = OffHostDoor(self._socket, "127.0.0.2", 0, keys)
        self.address = self._door.address

    def hears(self, socket: zmq.Socket[bytes]) -> None:
        """The link stands: keys were agreed on, and a word has come."""
        socket.send(b"a word")
        assert self._socket.poll(10_000)
        self._socket.recv_multipart()

    def die(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            self._door.close()
            self._context.term()


@pytest.fixture
def remote(keys: ControlKeys) -> Iterator[Remote]:
    made = Remote(keys)
    yield made
    made.die()


def until_lost(socket: zmq.Socket[bytes]) -> None:
    deadline = time.monotonic() + 10
    while not is_lost(socket):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Reports:
    def __init__(self) -> None:
        self.made: list[tuple[Life, str]] = []
        self.out_of_reach = OutOfReach(GROUP, lambda life, why: self.made.append((life, why)))


def test_a_link_that_breaks_is_given_up_once(remote: Remote, keys: ControlKeys) -> None:
    reports, link = Reports(), DecodeLink(GROUP, DECODE, remote.address, keys)
    reports.out_of_reach.look(link, greeted=True, now_seconds=time.monotonic())
    assert reports.made == []
    remote.hears(link.socket)
    remote.die()
    until_lost(link.socket)
    for _ in range(3):
        reports.out_of_reach.look(link, greeted=True, now_seconds=time.monotonic())
    assert reports.made == [(DECODE, "prefill-0: the link to it is lost")]
    link.close()


def test_a_worker_that_does_not_answer_a_greeting_is_given_up(
    remote: Remote, keys: ControlKeys
) -> None:
    reports, link = Reports(), DecodeLink(GROUP, DECODE, remote.address, keys)
    late = link.made_seconds + module.GREETING_SECONDS + 1
    reports.out_of_reach.look(link, greeted=True, now_seconds=late)
    reports.out_of_reach.look(link, greeted=False, now_seconds=late - 2)
    assert reports.made == []
    reports.out_of_reach.look(link, greeted=False, now_seconds=late)
    ((life, why),) = reports.made
    assert life == DECODE
    assert "firewall" in why
    link.close()


def test_a_life_that_is_over_is_forgotten_and_its_successor_looked_after(
    remote: Remote, keys: ControlKeys
) -> None:
    reports, link = Reports(), DecodeLink(GROUP, DECODE, remote.address, keys)
    reports.out_of_reach.give_up(link, "a reason")
    reports.out_of_reach.give_up(link, "another")
    reports.out_of_reach.over(DECODE)
    again = DecodeLink(GROUP, DECODE.next(), remote.address, keys)
    reports.out_of_reach.give_up(again, "x" * 5000)
    assert [life for life, _ in reports.made] == [DECODE, DECODE.next()]
    assert len(reports.made[1][1]) == 2000  # what a message has room for
    link.close()
    again.close()


def test_a_worker_of_this_host_is_not_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reports, link = Reports(), DecodeLink(GROUP, DECODE, f"ipc://{tmp_path}/none.sock")
    reports.out_of_reach.look(link, greeted=False, now_seconds=time.monotonic() + 1000)
    reports.out_of_reach.give_up(link, "its pool cannot be mapped")
    assert reports.made == []
    assert "its pool cannot be mapped" in caplog.text
    link.close()


@pytest.fixture
def worker(keys: ControlKeys) -> Iterator[JoinedWorker]:
    config = SimpleNamespace(control_host="127.0.0.2", watchdog_timeout=5)
    spec: Any = SimpleNamespace(control_keys=lambda: keys, engine_config=lambda: config)
    context = zmq.Context()
    door = context.socket(zmq.ROUTER)
    door.linger = 0
    made = JoinedWorker(spec, door)
    yield made
    door.close()
    made._door.close()
    context.term()


def test_a_worker_whose_link_to_the_server_is_lost_ends_unless_the_server_did(
    remote: Remote, keys: ControlKeys, worker: JoinedWorker
) -> None:
    link = dealer(DECODE.identity, remote.address, keys, contact_seconds=5)
    worker.check_server(link, SERVER, 0.0)
    remote.die()
    until_lost(link)
    patience = joined_module.EXPLANATION_SECONDS
    worker.check_server(link, SERVER, 10.0)
    worker.check_server(link, SERVER, 10.0 + patience)
    worker.check_server(None, None, 10.0 + patience)  # the news came: the server is down
    worker.check_server(link, SERVER, 20.0)
    with pytest.raises(CpkvError, match=r"link to server-0\.1 is lost"):
        worker.check_server(link, SERVER, 20.0 + patience + 0.1)
    link.close()


def test_a_worker_does_not_keep_pages_for_a_group_that_is_gone_for_ever(
    worker: JoinedWorker,
) -> None:
    worker.check_ending(GROUP, 10.0, 15.0)
    with pytest.raises(CpkvError, match=r"prefill-0\.1 had sent.*--watchdog-timeout"):
        worker.check_ending(GROUP, 10.0, 15.1)


def test_a_worker_that_joined_is_reached_at_the_address_of_its_host(worker: JoinedWorker) -> None:
    assert worker.address.startswith("tcp://127.0.0.2:")
