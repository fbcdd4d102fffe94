"""Who gets in at a decode worker's door, and that nobody who does not fit harms those who do."""

from __future__ import annotations

import msgspec
import pytest

from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.decode_door import DecodeDoor
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import Cancel
from cp_shared_kv.errors import HandshakeError, ProtocolError
from cp_shared_kv.transfer.messages import AbortRoom, Hello, Quiesced
from cp_shared_kv.transfer.regions import Region

GROUP, OTHER = Life("prefill", 0, 1), Life("prefill", 1, 1)
STOP = AbortRoom(epoch=7, peer_epoch=9, room=1, reason="enough")


def hello(role: str, **changes: object) -> Hello:
    values: dict[str, object] = {
        "epoch": 7 if role == "prefill" else 9,
        "role": role,
        "session_id": role,
        "transport": "shared_memory",
        "cp_size": 2 if role == "prefill" else 1,
        "page_size": 4,
        "latent_format": "l",
        "index_format": "i",
        "num_layers": 1,
        "index_layers": (),
        "bytes_per_page": 10,
        "model_fingerprint": "m",
        "physical_pages": 3,
        "regions": () if role == "prefill" else (Region("pool", 40),),
    }
    return Hello(**(values | changes))  # type: ignore[arg-type]


MINE = hello("decode")


class Door:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, msgspec.Struct]] = []
        self.idle = True
        self.door = DecodeDoor(
            MINE, send=lambda to, m: self.sent.append((to, m)), is_idle=lambda: self.idle
        )

    def admit(self, sender: bytes, message: msgspec.Struct):
        return self.door.admit(sender, encode(message))


@pytest.fixture
def door() -> Door:
    return Door()


def test_a_greeting_is_answered_and_then_messages_come_with_their_peer(door: Door) -> None:
    assert door.admit(GROUP.identity, hello("prefill")) is None
    assert door.sent == [(GROUP.identity, MINE)]
    admitted = door.admit(GROUP.identity, STOP)
    assert admitted is not None
    peer, message = admitted
    assert (peer.life, peer.epoch, message) == (GROUP, 7, STOP)
    peer.to_controller(STOP)
    peer.to_rank(1, STOP)
    assert door.sent[1:] == [(GROUP.identity, STOP), (GROUP.rank_identity(1), STOP)]


def test_ranks_speak_in_their_own_name_alone(door: Door) -> None:
    door.admit(GROUP.identity, hello("prefill"))
    quiet = Quiesced(epoch=7, peer_epoch=9, room=1, rank=1)
    admitted = door.admit(GROUP.rank_identity(1), quiet)
    assert admitted is not None
    assert admitted[1] == quiet
    for sender in (GROUP.rank_identity(0), GROUP.identity, b"prefill-0.1/rank-1/x"):
        with pytest.raises(ProtocolError, match="another than its sender"):
            door.admit(sender, quiet)
    with pytest.raises(ProtocolError, match="another than its sender"):
        door.admit(GROUP.rank_identity(1), STOP)


@pytest.mark.parametrize(
    "sender", [b"", b"\xff\x00", b"stranger", b"decode-0.1", b"server-0.1", b"/rank-0"]
)
def test_others_have_no_business_here(door: Door, sender: bytes) -> None:
    with pytest.raises(ProtocolError):
        door.admit(sender, hello("prefill"))
    assert door.sent == []


def test_nothing_is_taken_before_a_greeting(door: Door) -> None:
    with pytest.raises(ProtocolError, match="first message"):
        door.admit(GROUP.identity, STOP)
    with pytest.raises(ProtocolError, match="before the handshake"):
        door.admit(GROUP.rank_identity(0), hello("prefill"))
    with pytest.raises(ProtocolError):
        door.door.admit(GROUP.identity, b"\xc1")
    assert door.sent == []


def test_a_group_that_does_not_fit_is_told_so_and_its_neighbour_goes_on(door: Door) -> None:
    door.admit(OTHER.identity, hello("prefill"))
    with pytest.raises(HandshakeError, match="page_size: prefill 64, decode 4"):
        door.admit(GROUP.identity, hello("prefill", page_size=64))
    assert door.sent[-1] == (GROUP.identity, MINE)
    with pytest.raises(ProtocolError, match="first message"):
        door.admit(GROUP.identity, STOP)
    assert door.admit(OTHER.identity, STOP) is not None


def test_another_release_is_named_although_its_greeting_has_unknown_fields(door: Door) -> None:
    raw = msgspec.msgpack.decode(encode(hello("prefill")))
    later = msgspec.msgpack.encode(raw | {"protocol_version": 9, "warp_factor": 5})
    with pytest.raises(HandshakeError, match="protocol_version: prefill 9, decode 1"):
        door.door.admit(GROUP.identity, later)
    assert door.sent == [(GROUP.identity, MINE)]  # so that it can say the same


def test_a_group_may_greet_again_while_no_room_is_open(door: Door) -> None:
    door.admit(GROUP.identity, hello("prefill"))
    door.idle = False
    with pytest.raises(ProtocolError, match="while rooms are open"):
        door.admit(GROUP.identity, hello("prefill", epoch=8))
    door.idle = True
    assert door.admit(GROUP.identity, hello("prefill", epoch=8)) is None
    admitted = door.admit(GROUP.identity, STOP)
    assert admitted is not None
    assert admitted[0].epoch == 8


def test_a_lost_group_is_not_heard_again(door: Door) -> None:
    door.admit(GROUP.identity, hello("prefill"))
    peer = door.door.lost(GROUP)
    assert peer is not None
    assert peer.life == GROUP
    assert door.door.lost(OTHER) is None
    for life in (GROUP, OTHER):
        with pytest.raises(ProtocolError, match="gone"):
            door.admit(life.identity, hello("prefill"))
    assert door.admit(GROUP.next().identity, hello("prefill")) is None


def test_what_is_not_for_decode_is_refused(door: Door) -> None:
    door.admit(GROUP.identity, hello("prefill"))
    with pytest.raises(ProtocolError, match="cancel"):
        door.admit(GROUP.identity, Cancel(room=1))
