"""Who a Mooncake peer is: its endpoint within its session id, and the proof that it still lives.

An endpoint is a host and a port, which another process may have by now. So each life of a
receiver serves a region of its own, the proof of life, that holds its session id; a sender reads
it before it writes.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import ConfigError, TransferError
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo

LOOPBACK = "127.0.0.1"
"""Where both ends of this host are."""
LIFE_BYTES = 256
LIFE_SUFFIX = ".life"
_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,149}"
_SESSION_ID = re.compile(rf"\A{_NAME}@(?P<host>[0-9.]{{7,15}}):(?P<port>[0-9]{{1,5}})\Z")


def session_id_at(name: str, endpoint: str) -> str:
    """The session id of a receiver: the name of its life, and where it is reached.

    ConfigError for a name that cannot be one of a region too.
    """
    if not re.fullmatch(_NAME, name):
        raise ConfigError(
            "name of a Mooncake receiver",
            value=repr(name[:80]),
            allowed="1 to 150 of a-z A-Z 0-9 . _ -, not starting with a dot",
        )
    return f"{name}@{endpoint}"


def proof_of_life(session_id: str) -> npt.NDArray[np.uint8]:
    """What a receiver of that session id holds in its proof of life: u8[LIFE_BYTES]."""
    encoded = session_id.encode()
    return np.frombuffer(encoded.ljust(LIFE_BYTES, b"\0"), dtype=np.uint8).copy()


def life_region(name: str, address: int) -> Region:
    """The region of the proof of life, which comes last among a receiver's regions."""
    return Region(f"{name}{LIFE_SUFFIX}", LIFE_BYTES, address)


@dataclass(frozen=True)
class MooncakePeer:
    """A receiver whose PeerInfo has been checked: nothing of it is used before."""

    info: PeerInfo
    endpoint: str
    life: Region
    regions: dict[str, Region]
    """What may be written to, by name."""
    elsewhere: bool
    """On another host: then a lost connection does not prove that it applies nothing more."""

    @classmethod
    def of(cls, info: PeerInfo, *, other_hosts: bool = False) -> MooncakePeer:
        """TransferError (`unreachable`) unless it is a receiver, of this host or `other_hosts`."""
        found = _SESSION_ID.match(info.session_id)
        if found is None or not 0 < int(found["port"]) < 1 << 16:
            raise _refused("session id is not one of a Mooncake receiver", info, info.session_id)
        try:
            host = ipaddress.ip_address(found["host"])
        except ValueError:
            raise _refused("session id names no host", info, info.session_id) from None
        if host.is_unspecified or host.is_multicast:
            raise _refused("session id names no host", info, info.session_id)
        if not (host.is_loopback or other_hosts):
            raise _refused("peer is on another host; allowed: a loopback address", info, host)
        *regions, life = info.regions or (Region("none", 1),)
        if life.nbytes != LIFE_BYTES or not life.name.endswith(LIFE_SUFFIX):
            raise _refused("last region of the peer is not its proof of life", info, life.name)
        nowhere = [region.name for region in info.regions if not region.address]
        if nowhere:
            raise _refused("region of the peer has no address", info, nowhere[0])
        endpoint = f"{found['host']}:{found['port']}"
        elsewhere = other_hosts and str(host) != LOOPBACK
        return cls(info, endpoint, life, {region.name: region for region in regions}, elsewhere)


def _refused(what: str, info: PeerInfo, value: object) -> TransferError:
    return TransferError(
        what, kind="unreachable", peer=info.session_id, quiescent=True, value=value
    )
