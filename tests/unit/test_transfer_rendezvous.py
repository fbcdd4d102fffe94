"""The handshake: whatever must be equal and is not is refused, by name, before any traffic."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cp_shared_kv.errors import HandshakeError, ProtocolError
from cp_shared_kv.transfer.messages import PROTOCOL_VERSION, Hello, Released, encode
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.rendezvous import check_hello, read_hello

PREFILL = Hello(
    epoch=11,
    role="prefill",
    session_id="prefill-0",
    transport="shared_memory",
    cp_size=4,
    page_size=64,
    latent_format="fp32 r512 d64",
    index_format="fp32 d128",
    num_layers=2,
    index_layers=(0, 1),
    bytes_per_page=1000,
    model_fingerprint="tiny",
    physical_pages=50,
)
DECODE = msgspec.structs.replace(
    PREFILL,
    epoch=22,
    role="decode",
    session_id="decode-0",
    cp_size=1,
    physical_pages=9,
    regions=(Region("decode-0-22", 10_000),),
)

DIFFERENT: dict[str, Any] = {
    "transport": "mooncake",
    "page_size": 128,
    "model_fingerprint": "large",
    "num_layers": 3,
    "index_layers": (0,),
    "latent_format": "bf16 r512 d64",
    "index_format": "fp32 d128 hadamard",
    "bytes_per_page": 999,
    "page_checksum": "crc32",
}


def changed(hello: Hello, **fields: Any) -> Hello:
    return msgspec.structs.replace(hello, **fields)


def refusals(prefill: Hello, decode_side: Hello) -> set[str]:
    """What the two sides say; each checks the other."""
    said: set[str] = set()
    for mine, theirs in ((prefill, decode_side), (decode_side, prefill)):
        with pytest.raises(HandshakeError) as refused:
            check_hello(mine, theirs)
        said.add(str(refused.value))
    return said


def test_two_ends_that_fit_accept_each_other() -> None:
    check_hello(PREFILL, DECODE)
    check_hello(DECODE, PREFILL)


def test_group_size_pool_size_epoch_and_session_may_differ() -> None:
    check_hello(changed(PREFILL, cp_size=16, physical_pages=1, epoch=99), DECODE)


@pytest.mark.parametrize("field", DIFFERENT)
def test_a_difference_is_named_with_both_values_and_the_side_to_change(field: str) -> None:
    (said,) = refusals(PREFILL, changed(DECODE, **{field: DIFFERENT[field]}))
    assert field in said
    assert f"prefill {getattr(PREFILL, field)}, decode {DIFFERENT[field]}" in said
    assert "decode worker" in said or "both ends" in said


def test_every_field_that_describes_pages_must_be_equal() -> None:
    free = {"epoch", "role", "session_id", "cp_size", "physical_pages", "regions"}
    assert set(DIFFERENT) == set(Hello.__struct_fields__) - free - {"protocol_version"}


@pytest.mark.parametrize(("newer", "older"), [("PREFILL", "decode"), ("DECODE", "prefill")])
def test_the_older_release_is_the_one_to_upgrade(newer: str, older: str) -> None:
    ends = {"PREFILL": PREFILL, "DECODE": DECODE}
    ends[newer] = changed(ends[newer], protocol_version=PROTOCOL_VERSION + 1)
    (said,) = refusals(ends["PREFILL"], ends["DECODE"])
    assert "protocol_version" in said
    assert f"upgrade the {older} side" in said


def test_two_of_one_role_refuse_each_other() -> None:
    assert "both ends have the role decode" in refusals(DECODE, DECODE).pop()


def test_a_decode_group_is_refused() -> None:
    assert "one receiver" in refusals(PREFILL, changed(DECODE, cp_size=2)).pop()


@pytest.mark.parametrize("regions", [(), (Region("a", 5_000), Region("b", 4_999))])
def test_regions_too_small_for_decodes_pages_are_refused(regions: tuple[Region, ...]) -> None:
    said = refusals(PREFILL, changed(DECODE, regions=regions)).pop()
    assert f"{sum(region.nbytes for region in regions)} bytes; allowed: 10000" in said


def test_a_hello_is_read_as_it_was_sent() -> None:
    assert read_hello(encode(DECODE), PREFILL) == DECODE


def test_the_hello_of_a_later_release_is_refused_by_its_version_not_by_its_fields() -> None:
    raw = msgspec.msgpack.decode(encode(DECODE))
    later = msgspec.msgpack.encode(raw | {"protocol_version": 9, "warp_factor": 5})
    with pytest.raises(HandshakeError, match=r"protocol_version: prefill 1, decode 9.*upgrade"):
        read_hello(later, PREFILL)


def test_a_first_message_that_is_no_hello_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Released"):
        read_hello(encode(Released(epoch=1, peer_epoch=1, room=1)), PREFILL)
    with pytest.raises(ProtocolError):
        read_hello(b"\xc1 not a message", PREFILL)
    with pytest.raises(ProtocolError, match="unread"):
        read_hello(bytes((16 << 20) + 1), PREFILL)
