"""The handshake of a prefill group with one life of a decode worker, step by step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ConnectDecode, DecodeConnected
from cp_shared_kv.engine.pairing import Pairing
from cp_shared_kv.errors import HandshakeError, ProtocolError
from cp_shared_kv.transfer.messages import Hello
from cp_shared_kv.transfer.regions import Region

DECODE = Life("decode", 0, 1)


def hello(role: str, **changes: Any) -> Hello:
    values: dict[str, Any] = {
        "epoch": 7 if role == "prefill" else 9,
        "role": role,
        "session_id": f"run-{role}",
        "transport": "shared_memory",
        "cp_size": 2 if role == "prefill" else 1,
        "page_size": 4,
        "model_fingerprint": "m",
        "physical_pages": 3,
        "regions": () if role == "prefill" else (Region("pool", 40),),
        "latent_format": "l",
        "index_format": "i",
        "num_layers": 1,
        "index_layers": (),
        "bytes_per_page": 10,
    }
    return Hello(**(values | changes))


class Pair:
    def __init__(self) -> None:
        self.to_decode: list[msgspec.Struct] = []
        self.to_ranks: list[msgspec.Struct] = []
        self.pairing = Pairing(
            hello("prefill"),
            DECODE,
            "ipc://door",
            cp_size=2,
            send=self.to_decode.append,
            to_ranks=self.to_ranks.append,
        )


def test_greeting_mapping_and_the_pair_stands() -> None:
    pair = Pair()
    assert pair.to_decode == [hello("prefill")]
    pair.pairing.greeted(hello("decode"))
    assert pair.to_ranks == [ConnectDecode(address="ipc://door", hello=hello("decode"))]
    assert pair.pairing.mapped(DecodeConnected(rank=1, decode_epoch=9)) is None
    assert pair.pairing.mapped(DecodeConnected(rank=1, decode_epoch=9)) is None
    peer = pair.pairing.mapped(DecodeConnected(rank=0, decode_epoch=9))
    assert peer is not None
    assert (peer.life, peer.epoch) == (DECODE, 9)
    peer.send(hello("prefill"))
    assert len(pair.to_decode) == 2


def test_ends_that_do_not_fit_are_refused_before_any_rank_hears() -> None:
    pair = Pair()
    with pytest.raises(HandshakeError, match="page_size"):
        pair.pairing.greeted(hello("decode", page_size=8))
    assert pair.to_ranks == []


def test_a_rank_that_cannot_map_leaves_no_pair_and_is_named() -> None:
    pair = Pair()
    pair.pairing.greeted(hello("decode"))
    assert pair.pairing.mapped(DecodeConnected(rank=0, decode_epoch=9, failure="gone")) is None
    assert pair.pairing.mapped(DecodeConnected(rank=1, decode_epoch=9)) is None
    assert pair.pairing.failure == "rank 0: gone"


def test_what_was_not_asked_for_is_refused() -> None:
    pair = Pair()
    with pytest.raises(ProtocolError, match="not asked for"):
        pair.pairing.mapped(DecodeConnected(rank=0, decode_epoch=9))
    pair.pairing.greeted(hello("decode"))
    with pytest.raises(ProtocolError, match="not asked for"):
        pair.pairing.mapped(DecodeConnected(rank=0, decode_epoch=8))
    with pytest.raises(ProtocolError, match="second greeting"):
        pair.pairing.greeted(hello("decode"))
