"""The receiving end of Mooncake transfers: memory that senders write to."""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer
from cp_shared_kv.memory.cuda_ipc import CudaIpcBuffer
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

    With a `device` the memory is that GPU's. Over TCP it may come from any allocator; over NVLink,
    whose senders map it, from CudaIpcBuffer alone.
    """

    def __init__(self, name: str, host: str = LOOPBACK, device: torch.device | None = None) -> None:
        self._lock = threading.Lock()
        self._device = device
        before = listening_ports()
        engine = MooncakeEngine(host, on_gpu=device is not None)
        self._ports = listening_ports() - before
        self._engine: MooncakeEngine | None = engine
        self._session_id = session_id_at(name, engine.endpoint)
        self._over_nvlink = engine.over_nvlink
        self._life = self._proof(name)
        self._life_region = life_region(name, self._life.tensor.data_ptr())
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
        """Let peers write to `buffer`. `conflict` if it is exposed already, or cannot be."""
        name = buffer.name or f"private-{id(buffer):x}"
        self._check_kind(buffer)
        region = Region(name, buffer.nbytes, buffer.tensor.data_ptr())
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

    def _proof(self, name: str) -> Buffer:
        """The proof of life, in memory that senders can read."""
        proof = torch.from_numpy(proof_of_life(self._session_id))
        if self._over_nvlink and self._device is not None:
            buffer: Buffer = CudaIpcBuffer(f"{name}.life", len(proof), self._device)
        else:
            buffer = PrivateBuffer(len(proof))
        buffer.tensor.copy_(proof)
        return buffer

    def _check_kind(self, buffer: Buffer) -> None:
        """Refuse memory that the engine would take for something else, or could not map."""
        if buffer.tensor.is_cuda != (self._device is not None):
            where = "the host's memory" if self._device is None else f"memory of {self._device}"
            raise self._error(f"region of {buffer.tensor.device}, not of {where}", "conflict")
        if self._over_nvlink and not isinstance(buffer, CudaIpcBuffer):
            raise self._error(
                "region that senders cannot map: over NVLink it has to be plain cudaMalloc memory "
                "of its own (CudaIpcBuffer)",
                "conflict",
                value=type(buffer).__name__,
            )

    def _serve(self, engine: MooncakeEngine, region: Region) -> None:
        status = engine.expose(region.address, region.nbytes)
        if status:
            raise self._error(f"region {region.name} overlaps another", "conflict", value=status)

    def _error(self, what: str, kind: str, *, value: object = None) -> TransferError:
        return TransferError(what, kind=kind, peer=self._session_id, quiescent=True, value=value)
