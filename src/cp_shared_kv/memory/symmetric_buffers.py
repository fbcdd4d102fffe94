"""CUDA memory that the other GPUs of a group read in place, over NVLink or PCIe.

torch's symmetric memory maps it. Multicast is never asked for: nothing here needs it, and on
hosts that share their switches with others it is best left alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.distributed as dist

from cp_shared_kv.errors import InvariantError
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer
from cp_shared_kv.memory.process_bytes import all_gather_bytes

_log = logging.getLogger(__name__)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DIGEST_BYTES = 16


class _Handle(Protocol):
    """What is used of torch's `_SymmetricMemory`, which has no public type."""

    @property
    def rank(self) -> int: ...
    @property
    def buffer_ptrs(self) -> list[int]: ...
    def get_buffer(self, rank: int, sizes: list[int], dtype: torch.dtype) -> torch.Tensor: ...
    def barrier(self, channel: int) -> None: ...


class SymmetricBuffer:
    """`nbytes` zeroed bytes on this rank's GPU, mapped by every rank of a group. Use `create`."""

    def __init__(self, tensor: torch.Tensor, handle: _Handle) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._handle = handle
        self.nbytes = tensor.numel()
        own = handle.buffer_ptrs[handle.rank]
        self.peer_distances_bytes = tuple(pointer - own for pointer in handle.buffer_ptrs)
        """For each rank, how far its buffer lies from this rank's in this process's addresses."""

    @classmethod
    def create(cls, nbytes: int, process_group: dist.ProcessGroup, device: torch.device) -> Self:
        """Collective: every rank with the same size, once `why_not_mapped` has found nothing."""
        import torch.distributed._symmetric_memory as symmetric_memory

        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        tensor = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(tensor, process_group)
        tensor.zero_()
        buffer = cls(tensor, handle)
        # A peer may write here as soon as create returns: not before it is zeroed.
        buffer.barrier()
        return buffer

    @property
    def name(self) -> None:
        return None

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise InvariantError("buffer used after close()", value="symmetric buffer")
        return self._tensor

    def peer(self, rank: int) -> torch.Tensor:
        """u8[nbytes]: that rank's buffer, as this GPU reads it."""
        return self._handle.get_buffer(rank, [self.nbytes], torch.uint8)

    def barrier(self) -> None:
        """Collective, on the current stream; the host goes on at once.

        What follows on the stream sees what every rank had written to its buffer before.
        """
        self._handle.barrier(channel=0)

    def close(self) -> None:
        self._tensor = None


def gpu_buffer(nbytes: int, process_group: dist.ProcessGroup, device: torch.device) -> Buffer:
    """A buffer that the peers can read where they can; else a private one, and a warning why.

    Collective: all ranks of the group, with the same size, and all get the same kind.
    """
    reason = why_not_mapped(process_group, device)
    if reason is None:
        return SymmetricBuffer.create(nbytes, process_group, device)
    if process_group.rank() == 0:
        _log.warning("GPUs cannot read each other's memory (%s); prefixes go by collective", reason)
    return PrivateBuffer(nbytes, device)


def why_not_mapped(
    process_group: dist.ProcessGroup, device: torch.device, *, one_gpu_will_do: bool = False
) -> str | None:
    """Why the ranks' GPUs cannot read each other's memory; None where they can.

    one_gpu_will_do: for memory that processes of one GPU can map, too, as symmetric memory cannot.
    Collective. The same answer on every rank, so none is left behind in a rendezvous.
    """
    visible = [_digest(_uuid(index)) for index in range(torch.cuda.device_count())]
    host, own = _digest(_BOOT_ID.read_text()), visible[device.index]
    told = all_gather_bytes(host + own, process_group, device)
    hosts = {peer[:_DIGEST_BYTES] for peer in told}
    peers = [peer[_DIGEST_BYTES:] for peer in told]
    reasons: list[str] = []
    if len(hosts) > 1:
        reasons.append(f"the ranks are on {len(hosts)} hosts")
    elif not one_gpu_will_do and len(set(peers)) < len(peers):
        reasons.append("two ranks use one GPU")
    elif not all(peer in visible for peer in peers):
        reasons.append("CUDA_VISIBLE_DEVICES hides the peers' GPUs from a rank")
    elif not all(
        peer == own or torch.cuda.can_device_access_peer(device.index, visible.index(peer))
        for peer in peers
    ):
        reasons.append("no peer-to-peer access between the GPUs")
    # One rank's reason is every rank's.
    text = reasons[0].encode() if reasons else b""
    answers = all_gather_bytes(text.ljust(64)[:64], process_group, device)
    return next((answer.decode().strip() for answer in answers if answer.strip()), None)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
