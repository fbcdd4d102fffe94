"""The receiving end of Mooncake transfers: memory that senders write to."""

from __future__ import annotations

import threading
from collections.abc import Collection

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import Buffer
from cp_shared_kv.transfer.mooncake import MooncakeEngine
from cp_shared_kv.transfer.mooncake_session import (
    LOOPBACK,
    life_region,
    proof_of_life,
    session_id_at,
)
from cp_shared_kv.transfer.mooncake_sockets import (
    ended_connections,
    listening_ports,
    open_connections,
)
from cp_shared_kv.transfer.regions import Region


class MooncakeTarget:
    """KVTarget whose engine writes what arrives, from a thread of its own, into exposed memory.

    `name` is this life's, with its epoch; the session id is made of it and of the endpoint. `host`
    is the address that senders use. Whatever it is, the engine listens on all addresses of the
    machine and asks nobody who they are: whoever reaches its ports can read and write what is
    exposed. StartupError without the wheel.
    """

    def __init__(self, name: str, host: str = LOOPBACK) -> None:
        self._lock = threading.Lock()
        before = listening_ports()
        engine = MooncakeEngine(host)
        self._ports = listening_ports() - before
        self._engine: MooncakeEngine | None = engine
        self._session_id = session_id_at(name, engine.endpoint)
        self._life = proof_of_life(self._session_id)
        self._life_region = life_region(name, self._life.ctypes.data)
        self._buffers: dict[Region, Buffer] = {}
        self._serve(engine, self._life_region)

    @property
    def session_id(self) -> str:
        """What senders connect to."""
        return self._session_id

    @property
    def regions(self) -> tuple[Region, ...]:
        """The exposed regions, in that order, and this life's proof of life."""
        with self._lock:
            return (*self._buffers, self._life_region)

    def expose(self, buffer: Buffer) -> Region:
        """Let peers write to `buffer`, in host memory. `conflict` if it is exposed already."""
        name = buffer.name or f"private-{id(buffer):x}"
        memory = buffer.tensor.numpy()
        region = Region(name, buffer.nbytes, memory.ctypes.data)
        with self._lock:
            if self._engine is None:
                raise self._error("target is closed", "closed")
            if any(region.name == name for region in self._buffers):
                raise self._error(f"region {name} is exposed already", "conflict")
            self._serve(self._engine, region)
            self._buffers[region] = buffer
        return region

    def connections(self) -> frozenset[str]:
        """The connections on which something may come now, the kernel's queues included."""
        return open_connections(self._ports)

    def settled(self, before: Collection[str] = ()) -> bool:
        """Everything has been read that senders had written when they ended, and none of the
        connections `before` is open."""
        if ended_connections(self._ports):
            return False
        return not before or self.connections().isdisjoint(before)

    def close(self) -> None:
        """Take nothing more; waits up to a second, in which no Python thread runs."""
        with self._lock:
            engine, self._engine = self._engine, None
        del engine
        self._buffers.clear()

    def _serve(self, engine: MooncakeEngine, region: Region) -> None:
        status = engine.expose(region.address, region.nbytes)
        if status:
            raise self._error(f"region {region.name} overlaps another", "conflict", value=status)

    def _error(self, what: str, kind: str, *, value: object = None) -> TransferError:
        return TransferError(what, kind=kind, peer=self._session_id, quiescent=True, value=value)
