"""The bytes a rank holds besides its pool, reused by every batch and bounded by one limit."""

from __future__ import annotations

import torch

from cp_shared_kv.errors import CapacityError


class Scratch:
    """Named byte buffers that grow by need and are kept for the next batch.

    Every rank of a group is given the same limit. What is taken depends on the batch alone, so
    either all ranks raise or none does, and none is left waiting in a collective.
    """

    def __init__(self, limit_bytes: int, device: torch.device | None = None) -> None:
        """In host memory, or in that of `device`."""
        self.limit_bytes = limit_bytes
        self._device = torch.device("cpu") if device is None else device
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def bytes_in_use(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())

    def take(self, purpose: str, nbytes: int) -> torch.Tensor:
        """u8[nbytes] with whatever the last use left in it; CapacityError past the limit.

        It replaces what was taken for the same purpose before.
        """
        held = self._buffers.get(purpose)
        held_bytes = 0 if held is None else held.numel()
        if held is None or held_bytes < nbytes:
            others_bytes = self.bytes_in_use - held_bytes
            if others_bytes + nbytes > self.limit_bytes:
                raise CapacityError(
                    f"scratch for {purpose}",
                    value=f"{nbytes} bytes beside the {others_bytes} in use",
                    allowed=f"{self.limit_bytes} bytes in all",
                    change="raise the scratch limit, or put shorter prefixes in one batch",
                )
            held = None
            self._buffers.pop(purpose, None)  # first, so that old and new never exist together
            # A tensor made in inference mode could not be reused outside it.
            with torch.inference_mode(False):
                held = self._buffers[purpose] = self._allocate(nbytes)
        return held[:nbytes]

    def close(self) -> None:
        """Forget all buffers."""
        self._buffers.clear()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
