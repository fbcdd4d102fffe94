"""Another process's memory on a GPU, as the host of a test sees it."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.memory.cuda_ipc import CudaIpcMapping


class GpuView:
    """`nbytes` bytes behind an IPC handle, mapped for `device` until it is closed.

    `device` is the one whose transport maps them too: one process maps a handle in one context.
    """

    def __init__(self, ipc_handle: bytes, nbytes: int, device: torch.device) -> None:
        self._device = device
        self._mapping: CudaIpcMapping | None = CudaIpcMapping(ipc_handle, nbytes, device)
        self._driver = ctypes.CDLL("libcuda.so.1")

    def read(self, offset_bytes: int = 0, nbytes: int | None = None) -> npt.NDArray[np.uint8]:
        """u8[nbytes]: a copy of what is there now, by default of all."""
        assert self._mapping is not None
        count = self._mapping.nbytes - offset_bytes if nbytes is None else nbytes
        assert 0 <= offset_bytes <= offset_bytes + count <= self._mapping.nbytes
        host = np.empty(count, dtype=np.uint8)
        torch.cuda.set_device(self._device)
        code = self._driver.cuMemcpyDtoH_v2(
            ctypes.c_void_p(host.ctypes.data),
            ctypes.c_uint64(self._mapping.address + offset_bytes),
            ctypes.c_size_t(count),
        )
        assert code == 0, f"cuMemcpyDtoH failed with {code}"
        return host

    def close(self) -> None:
        """Unmap it. Again: no effect."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()
