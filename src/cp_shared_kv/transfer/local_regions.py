"""The buffers that a transport may read from: the registry that every local range is checked by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import Buffer
from cp_shared_kv.transfer.regions import Region

Memory = npt.NDArray[np.uint8]
View = TypeVar("View")


def host_bytes(tensor: torch.Tensor) -> Memory:
    """The bytes of a buffer in host memory."""
    return tensor.numpy()


class LocalRegions(Generic[View]):
    """Registered buffers by name, and how many writes read from each. Its owner locks it.

    A registered buffer's memory stays alive until it is removed, also if the buffer is closed.
    """

    def __init__(
        self,
        session_id: str,
        view: Callable[[torch.Tensor], View],
    ) -> None:
        """`view` makes of a buffer's tensor what `get` is to return."""
        self._session_id = session_id
        self._view = view
        self._memory: dict[str, View] = {}
        self._nbytes: dict[str, int] = {}
        self._writes: Counter[str] = Counter()

    def add(self, buffer: Buffer) -> Region:
        """Register a buffer. TransferError: `conflict` if its name is taken."""
        name = buffer.name or f"private-{id(buffer):x}"
        if name in self._memory:
            raise self._error(f"region {name} is registered already", "conflict")
        self._memory[name], self._nbytes[name] = self._view(buffer.tensor), buffer.nbytes
        return Region(name, buffer.nbytes)

    def remove(self, region: Region) -> None:
        """Forget a region. TransferError: `unknown_region`; `in_use` while a write reads it."""
        if region.name not in self._memory:
            raise self._error(f"region {region.name} is not registered", "unknown_region")
        if self._writes[region.name]:
            raise self._error(
                f"region {region.name} is being read by a write", "in_use", quiescent=False
            )
        del self._memory[region.name], self._nbytes[region.name]

    def get(self, name: str) -> View | None:
        """The bytes of a region."""
        return self._memory.get(name)

    def nbytes(self, name: str) -> int:
        """The size of a registered region."""
        return self._nbytes[name]

    def begin_write(self, name: str) -> None:
        """A write reads from the region until `end_write`."""
        self._writes[name] += 1

    def end_write(self, name: str) -> None:
        """A write that began does not read from the region any more."""
        self._writes[name] -= 1

    @property
    def writes(self) -> int:
        """Writes that have begun and not ended."""
        return self._writes.total()

    def clear(self) -> None:
        """Forget all regions; no write may be under way."""
        self._memory.clear()
        self._nbytes.clear()

    def _error(self, what: str, kind: str, *, quiescent: bool = True) -> TransferError:
        return TransferError(what, kind=kind, peer=self._session_id, quiescent=quiescent)
