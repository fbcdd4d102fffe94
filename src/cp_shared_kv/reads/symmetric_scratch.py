"""Scratch on a GPU that the other ranks write into."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.mapped_buffers import MappedBuffer
from cp_shared_kv.memory.symmetric_buffers import SymmetricBuffer
from cp_shared_kv.reads.scratch import Scratch


class SymmetricScratch(Scratch):
    """A `Scratch` whose buffers every rank of the group has mapped.

    `take` is collective where a buffer has to grow. Since what is taken depends on the batch
    alone, all ranks then grow the same one.
    """

    def __init__(
        self,
        limit_bytes: int,
        process_group: dist.ProcessGroup,
        device: torch.device,
        memory: type[SymmetricBuffer | MappedBuffer] = SymmetricBuffer,
    ) -> None:
        """process_group: one that such memory is made over, see there."""
        super().__init__(limit_bytes, device)
        self._process_group = process_group
        self._memory = memory
        self._symmetric: list[SymmetricBuffer | MappedBuffer] = []

    def peer_distances_bytes(self, taken: torch.Tensor) -> tuple[int, ...]:
        """For each rank, from a part of what was taken here to the same part of its scratch.

        ConfigError for a tensor that does not lie in this scratch.
        """
        address = taken.data_ptr()
        for buffer in self._symmetric:
            start = buffer.tensor.data_ptr()
            if start <= address and address + taken.nbytes <= start + buffer.nbytes:
                return buffer.peer_distances_bytes
        raise ConfigError(
            "memory that peers would write to",
            value=f"{taken.nbytes} bytes elsewhere",
            allowed="a part of the symmetric scratch",
        )

    def close(self) -> None:
        """Give all of it up, at the end of an epoch; no rank may be reading or writing."""
        for buffer in self._symmetric:
            buffer.close()
        self._symmetric.clear()
        super().close()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return super()._allocate(nbytes)
        # No peer's write may still be on its way into what is let go of here.
        torch.cuda.synchronize(self._device)
        dist.barrier(self._process_group)
        outgrown = [b for b in self._symmetric if not self._holds(b)]
        self._symmetric = [b for b in self._symmetric if self._holds(b)]
        mapped = [b for b in outgrown if isinstance(b, MappedBuffer)]
        for buffer in mapped:
            buffer.unmap_peers()
        if mapped:  # CUDA does not say what becomes of memory that is freed while a peer maps it
            dist.barrier(self._process_group)
        for buffer in outgrown:
            buffer.close()
        # It comes from elsewhere than torch's allocator, which keeps what it has been given back.
        torch.cuda.empty_cache()
        buffer = self._memory.create(nbytes, self._process_group, self._device)
        self._symmetric.append(buffer)
        return buffer.tensor

    def _holds(self, buffer: SymmetricBuffer | MappedBuffer) -> bool:
        return any(buffer.tensor is held for held in self._buffers.values())
