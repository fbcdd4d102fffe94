"""Plain CUDA memory that the ranks of one host have mapped: for pools that an engine also registers
with its transport, which may not take memory of torch's symmetric kind."""

from __future__ import annotations

from typing import Self

import torch
import torch.distributed as dist

from cp_shared_kv.memory.cuda_ipc import HANDLE_BYTES, CudaIpcBuffer, CudaIpcMapping
from cp_shared_kv.memory.process_bytes import all_gather_bytes, raise_if_any_failed


class MappedBuffer:
    """`nbytes` zeroed bytes of cudaMalloc'ed memory, mapped by every rank. Use `create`.

    What `SymmetricBuffer` offers to reads, but for its barrier, which here is an all-reduce of the
    process group.
    """

    def __init__(
        self,
        own: CudaIpcBuffer,
        peers: dict[int, CudaIpcMapping],
        process_group: dist.ProcessGroup,
    ) -> None:
        self._own = own
        self._device = own.tensor.device
        self._peers = peers
        self._process_group = process_group
        self._token = torch.zeros(1, dtype=torch.int32, device=self._device)
        self.nbytes = own.nbytes
        address = own.tensor.data_ptr()
        self.peer_distances_bytes = tuple(
            peers[rank].address - address if rank in peers else 0
            for rank in range(process_group.size())
        )
        """For each rank, how far its buffer lies from this rank's in this process's addresses."""

    @classmethod
    def create(cls, nbytes: int, process_group: dist.ProcessGroup, device: torch.device) -> Self:
        """Collective: every rank with the same size, once `why_not_mapped` has found nothing.

        process_group: NCCL's. If any rank cannot make or map memory, every rank raises.
        """
        failure: Exception | None = None
        own: CudaIpcBuffer | None = None
        peers: dict[int, CudaIpcMapping] = {}
        try:
            own = CudaIpcBuffer("pool", nbytes, device)
        except Exception as error:  # told to all below, then raised
            failure = error
        handle = bytes(HANDLE_BYTES) if own is None else own.ipc_handle
        _agree(failure, "make its pool", process_group, device)
        handles = all_gather_bytes(handle, process_group, device)
        try:
            for rank, peer_handle in enumerate(handles):
                if rank != process_group.rank():
                    peers[rank] = CudaIpcMapping(peer_handle, nbytes, device)
        except Exception as error:
            failure = error
        try:
            _agree(failure, "map its peers' pools", process_group, device)
        except Exception:
            for mapping in peers.values():
                mapping.close()
            raise
        assert own is not None
        return cls(own, peers, process_group)

    @property
    def name(self) -> None:
        return None

    @property
    def tensor(self) -> torch.Tensor:
        return self._own.tensor

    def barrier(self) -> None:
        """Collective, on the current stream; the host goes on at once.

        What follows on the stream sees what every rank had written to its buffer before.
        """
        dist.all_reduce(self._token, group=self._process_group)

    def unmap_peers(self) -> None:
        """Give the peers' memory up, which they may free once every rank has."""
        torch.cuda.synchronize(self._device)
        for mapping in self._peers.values():
            mapping.close()
        self._peers.clear()

    def close(self) -> None:
        """Unmap the peers' memory and give this rank's back; no rank may be reading. Again: no
        effect."""
        self.unmap_peers()
        self._own.close()


def _agree(
    failure: Exception | None, what: str, process_group: dist.ProcessGroup, device: torch.device
) -> None:
    flags = all_gather_bytes(bytes([failure is not None]), process_group, device)
    raise_if_any_failed(failure, [flag != b"\0" for flag in flags], what)
