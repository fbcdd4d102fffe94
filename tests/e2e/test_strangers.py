"""Well-formed messages from a process that is not a party: refused, and nobody else is harmed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import zmq

from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    BatchDone,
    BeginReplay,
    Paired,
    Registered,
    RoomConcluded,
)
from cp_shared_kv.testing.running_cluster import Running
from cp_shared_kv.transfer.messages import Concluded, Hello, decode

pytestmark = pytest.mark.e2e


def strange_messages(served: Running) -> dict[str, list[msgspec.Struct]]:
    """By socket, what would stop or wedge a process that believed it."""
    spec = served.cluster.spec
    hello = spec.hello(role="prefill", epoch=7, session_id="stranger", physical_pages=16)
    return {
        spec.endpoints.inbox(Life("decode", 0, 1)): [
            hello,
            msgspec.structs.replace(hello, page_size=32),
            BeginReplay(prefill_epoch=7, record="/nonexistent"),
            Concluded(
                epoch=7,
                peer_epoch=7,
                room=1,
                rank=0,
                outcome="success",
                quiescent=True,
                sent_chunks=0,
                total_positions=0,
            ),
        ],
        spec.endpoints.inbox(Life("prefill", 0, 1)): [
            BatchDone(rank=0, batch_id=10**6, tokens=[], scratch_bytes=0),
            BatchDone(rank=1, batch_id=10**6, tokens=[], scratch_bytes=0),
            RoomConcluded(rank=0, room=1, pages=0, descriptors=0, bytes=0),
        ],
    }


@pytest.mark.parametrize("busy", [False, True])
def test_a_strangers_messages_are_refused_and_requests_go_on(served: Running, busy: bool) -> None:
    body = {"model": "demo", "prompt": f"stranger {busy} " * 60, "max_tokens": 40}
    body |= {"ignore_eos": True, "temperature": 0}
    alone = served.post(body).json()["choices"][0]["text"]
    refused_before = len(served.log_lines("message refused"))
    sockets: list[zmq.Socket[bytes]] = []
    sent = 0
    for address, messages in strange_messages(served).items():
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 1000
        socket.connect(address)
        sockets.append(socket)
        for message in messages:
            socket.send(encode(message))
            sent += 1
        socket.send(b"\xc1 garbage")
        sent += 1
    if not busy:
        time.sleep(0.3)
    assert served.post(body).json()["choices"][0]["text"] == alone
    deadline = time.monotonic() + 10
    while len(served.log_lines("message refused")) - refused_before < sent:
        assert time.monotonic() < deadline, served.log_lines("message refused")[refused_before:]
        time.sleep(0.1)
    for socket in sockets:
        socket.close()
    assert {name: served.cluster.life(name).number for name in ("prefill-0", "decode-0")} == {
        "prefill-0": 1,
        "decode-0": 1,
    }
    assert served.get("/health").status_code == 200


def test_who_takes_the_name_of_a_controller_is_not_heard(served: Running) -> None:
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.linger = 0
    stranger.setsockopt(zmq.IDENTITY, Life("prefill", 0, 1).identity)
    stranger.connect(served.cluster.spec.endpoints.inbox(Life("decode", 0, 1)))
    time.sleep(0.3)
    body = {"model": "demo", "prompt": "who is it " * 20, "max_tokens": 3}
    assert served.post(body).status_code == 200
    stranger.close()
    assert served.post(body).status_code == 200


def test_a_group_that_was_never_started_gets_no_request(served: Running) -> None:
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.linger = 0
    stranger.setsockopt(zmq.IDENTITY, Life("prefill", 7, 1).identity)
    stranger.connect(served.cluster.spec.endpoints.inbox(Life("server", 0, 1)))
    stranger.send(encode(Registered()))
    stranger.send(encode(Paired(decode=str(Life("decode", 0, 1)))))
    time.sleep(0.3)
    body = {"model": "demo", "prompt": "which group? ", "max_tokens": 3, "temperature": 0}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(served.post, [body] * 16))
    assert {answer.status_code for answer in answers} == {200}
    assert not stranger.poll(0)
    shown = served.get("/dashboard/state").text
    assert "prefill-0" in shown
    assert "prefill-7" not in shown
    stranger.close()


def test_a_group_that_does_not_fit_is_turned_away_and_requests_go_on(served: Running) -> None:
    spec = served.cluster.spec
    misfit = spec.hello(role="prefill", epoch=7, session_id="misfit", physical_pages=16)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 1000
    socket.setsockopt(zmq.IDENTITY, b"prefill-9.1")
    socket.connect(spec.endpoints.inbox(Life("decode", 0, 1)))
    socket.send(encode(msgspec.structs.replace(misfit, page_size=32)))
    assert socket.poll(10_000)
    answer = decode(socket.recv())
    assert isinstance(answer, Hello)
    assert answer.page_size == 64
    socket.close()
    body = {"model": "demo", "prompt": "and the others? ", "max_tokens": 4, "temperature": 0}
    assert served.post(body).status_code == 200
    assert served.log_lines("message refused: prefill and decode differ in page_size")
    assert served.cluster.life("decode-0").number == 1


def test_a_stranger_at_the_supervisor_ends_nothing(served: Running) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 1000
    socket.connect(served.cluster.spec.endpoints.supervisor)
    for frames in ([b""], [b"a", b"b", b"c"], [b"\xc1"], [b"", b""]):
        socket.send_multipart(frames)
    time.sleep(0.5)
    socket.close()
    assert served.cluster.fatal is None
    assert served.get("/health").status_code == 200
