"""Who is taken for a Mooncake receiver, and how a region's address travels."""

from __future__ import annotations

import msgspec
import pytest

from cp_shared_kv.errors import ConfigError, TransferError
from cp_shared_kv.transfer.mooncake_session import (
    LIFE_BYTES,
    MooncakePeer,
    life_region,
    proof_of_life,
    session_id_at,
)
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo

POOL = Region("pool", 4096, 1 << 40)
LIFE = life_region("decode-7", 1 << 41)
SESSION = "decode-7@127.0.0.1:15001"


def test_a_receiver_is_found_by_its_session_id() -> None:
    peer = MooncakePeer.of(PeerInfo(SESSION, (POOL, LIFE)))
    assert (peer.endpoint, peer.life, peer.regions) == ("127.0.0.1:15001", LIFE, {"pool": POOL})
    assert session_id_at("decode-7", "127.0.0.1:15001") == SESSION


@pytest.mark.parametrize(
    ("session_id", "regions", "named"),
    [
        ("decode-7", (POOL, LIFE), "not one of a Mooncake receiver"),
        ("decode-7@127.0.0.1", (POOL, LIFE), "not one of a Mooncake receiver"),
        ("decode-7@127.0.0.1:0", (POOL, LIFE), "not one of a Mooncake receiver"),
        ("decode-7@127.0.0.1:70000", (POOL, LIFE), "not one of a Mooncake receiver"),
        ("decode-7@127.0.0.1:15001\n", (POOL, LIFE), "not one of a Mooncake receiver"),
        ("decode 7@127.0.0.1:15001", (POOL, LIFE), "not one of a Mooncake receiver"),
        ("a@b@127.0.0.1:15001", (POOL, LIFE), "not one of a Mooncake receiver"),
        ("decode-7@999.0.0.1:15001", (POOL, LIFE), "names no host"),
        ("decode-7@192.0.2.7:15001", (POOL, LIFE), "on another host"),
        (SESSION, (), "proof of life"),
        (SESSION, (POOL,), "proof of life"),
        (SESSION, (LIFE, POOL), "proof of life"),
        (SESSION, (POOL, Region("decode-7.life", LIFE_BYTES + 1, 8)), "proof of life"),
        (SESSION, (POOL, Region("decode-7.life", LIFE_BYTES)), "no address"),
        (SESSION, (Region("pool", 4096), LIFE), "no address"),
    ],
)
def test_what_is_no_receiver_of_this_host_is_refused(
    session_id: str, regions: tuple[Region, ...], named: str
) -> None:
    with pytest.raises(TransferError, match=named) as refused:
        MooncakePeer.of(PeerInfo(session_id, regions))
    assert (refused.value.kind, refused.value.quiescent) == ("unreachable", True)


def test_a_receiver_of_another_host_is_taken_only_where_other_hosts_are_allowed() -> None:
    info = PeerInfo("decode-7@192.0.2.7:15001", (POOL, LIFE))
    with pytest.raises(TransferError, match="on another host"):
        MooncakePeer.of(info)
    peer = MooncakePeer.of(info, other_hosts=True)
    assert (peer.endpoint, peer.elsewhere) == ("192.0.2.7:15001", True)


def test_only_the_loopback_address_that_is_the_default_counts_as_this_host() -> None:
    for host, elsewhere in {"127.0.0.1": False, "127.0.0.2": True}.items():
        info = PeerInfo(f"decode-7@{host}:15001", (POOL, LIFE))
        assert MooncakePeer.of(info, other_hosts=True).elsewhere is elsewhere
        assert not MooncakePeer.of(info).elsewhere


@pytest.mark.parametrize("host", ["0.0.0.0", "224.0.0.1", "999.0.0.1"])
def test_an_address_of_no_host_is_refused_whatever_is_allowed(host: str) -> None:
    with pytest.raises(TransferError, match="names no host"):
        MooncakePeer.of(PeerInfo(f"decode-7@{host}:15001", (POOL, LIFE)), other_hosts=True)


@pytest.mark.parametrize("name", ["", ".hidden", "a@b", "a b", "x" * 151])
def test_a_name_that_cannot_travel_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 150"):
        session_id_at(name, "127.0.0.1:15001")


def test_two_lives_never_have_the_same_proof() -> None:
    longest = session_id_at("x" * 150, "127.127.127.127:65535")
    proofs = [proof_of_life(s).tobytes() for s in (SESSION, SESSION + "0", longest)]
    assert [len(proof) for proof in proofs] == [LIFE_BYTES] * 3
    assert len(set(proofs)) == 3


def test_a_region_without_address_travels_as_it_always_has() -> None:
    assert msgspec.json.encode(Region("pool", 64)) == b'{"name":"pool","nbytes":64}'
    assert msgspec.json.decode(b'{"name":"pool","nbytes":64}', type=Region) == Region("pool", 64)
    there_and_back = msgspec.json.decode(msgspec.json.encode(POOL), type=Region)
    assert there_and_back == POOL


@pytest.mark.parametrize("address", [-1, 1 << 63, (1 << 63) - 63, (1 << 64) - 1, "7", 1.5, None])
def test_an_address_outside_the_address_space_is_refused_unread(address: object) -> None:
    data = msgspec.json.encode({"name": "pool", "nbytes": 64, "address": address})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data, type=Region)
    last = {"name": "pool", "nbytes": 64, "address": (1 << 63) - 64}
    assert msgspec.convert(last, Region).address == (1 << 63) - 64
