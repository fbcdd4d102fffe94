"""The links of a prefill group: strange first words, and strangers while a step is awaited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from cp_shared_kv.engine import links as module
from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.endpoints import Endpoints
from cp_shared_kv.engine.links import DecodeLink, RanksLink, dealer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import RankReady
from cp_shared_kv.errors import HandshakeError, ProtocolError
from cp_shared_kv.transfer.messages import AbortRoom, Hello
from cp_shared_kv.transfer.regions import Region

GROUP, DECODE = Life("prefill", 0, 1), Life("decode", 0, 1)


def hello(role: Any) -> Hello:
    return Hello(
        epoch=7 if role == "prefill" else 9,
        role=role,
        session_id=role,
        transport="shared_memory",
        cp_size=1,
        page_size=4,
        latent_format="l",
        index_format="i",
        num_layers=1,
        index_layers=(),
        bytes_per_page=10,
        model_fingerprint="m",
        physical_pages=3,
        regions=() if role == "prefill" else (Region("pool", 40),),
    )


@pytest.fixture
def door(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(f"ipc://{tmp_path}/decode.sock")
    yield socket
    socket.close()


def test_what_is_sent_to_a_lost_decode_worker_goes_nowhere(
    door: zmq.Socket[bytes], tmp_path: Path
) -> None:
    link = DecodeLink(GROUP, DECODE, f"ipc://{tmp_path}/decode.sock")
    link.close()
    # The server cancels a room whose ranks have not concluded yet.
    link.send(AbortRoom(epoch=7, peer_epoch=9, room=1, reason="the client went away"))
    assert not door.poll(50)


def test_a_decode_worker_of_another_release_is_named_by_its_version(
    door: zmq.Socket[bytes], tmp_path: Path
) -> None:
    link = DecodeLink(GROUP, DECODE, f"ipc://{tmp_path}/decode.sock")
    link.send(hello("prefill"))
    identity, _ = door.recv_multipart()
    raw = msgspec.msgpack.decode(encode(hello("decode")))
    later = msgspec.msgpack.encode(raw | {"protocol_version": 9, "warp_factor": 5})
    door.send_multipart([identity, later])
    with pytest.raises(HandshakeError, match=r"protocol_version: prefill 1, decode 9.*upgrade"):
        link.greeting(hello("prefill"))
    door.send_multipart([identity, encode(hello("decode"))])
    assert link.greeting(hello("prefill")) == hello("decode")
    link.close()


def test_a_stranger_does_not_end_the_wait_for_the_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec: Any = SimpleNamespace(endpoints=Endpoints(tmp_path), limits=SimpleNamespace(cp_size=2))
    ranks = RanksLink(spec, GROUP)
    address = spec.endpoints.inbox(GROUP)
    stranger = dealer(b"stranger", address)
    stranger.send(b"\xc1")
    stranger.send(encode(RankReady(rank=0)))
    assert ranks.socket.poll(10_000)
    links = [dealer(GROUP.rank_identity(rank), address) for rank in range(2)]
    for rank, link in enumerate(links):
        link.send(encode(RankReady(rank=rank)))
    told = ranks.wait_for(RankReady, "come up")
    assert [message.rank for message in told] == [0, 1]
    assert "message refused" in caplog.text
    for link in (stranger, *links):
        link.close()
    ranks.close()


def test_ranks_may_take_as_long_to_load_as_the_supervisor_lets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: Any = SimpleNamespace(endpoints=Endpoints(tmp_path), limits=SimpleNamespace(cp_size=1))
    ranks = RanksLink(spec, GROUP)
    link = dealer(GROUP.rank_identity(0), spec.endpoints.inbox(GROUP))
    hours = iter(range(0, 10 * 3600, 3600))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    link.send(b"\xc1")
    link.send(encode(RankReady(rank=0)))
    ranks.wait_until_ready()
    link.close()
    ranks.close()


@pytest.mark.parametrize("address", ["", "nonsense", "ipc://\x00", "tcp://no.such.host.invalid"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ProtocolError, match="address"):
        dealer(b"me", address)
