"""GPU memory that other processes of this host can map: CUDA's interprocess handles.

Taken from the driver itself. torch's allocator hands out parts of larger allocations, of which a
handle would give away the whole.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

from cp_shared_kv.errors import CapacityError, InvariantError, StartupError

HANDLE_BYTES = 64
_GRANULE_BYTES = 2 << 20
"""A transport that hands a whole allocation to a network card needs whole pages of the host's."""
_OUT_OF_MEMORY = 2
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Allocation:
    """Memory of the driver, freed once no tensor of it is left."""

    def __init__(self, nbytes: int) -> None:
        pointer = ctypes.c_uint64()
        granules = -(-nbytes // _GRANULE_BYTES)
        code = _driver().cuMemAlloc_v2(
            ctypes.byref(pointer), ctypes.c_size_t(granules * _GRANULE_BYTES)
        )
        if code == _OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info()
            raise CapacityError(
                "too little memory on the GPU",
                value=f"{nbytes} bytes wanted",
                allowed=f"{free} bytes free of {total}",
                change="lower --decode-max-total-tokens or --max-total-tokens",
            )
        _check("cuMemAlloc", code)
        self.address = pointer.value
        self.__cuda_array_interface__ = {
            "data": (self.address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        # At the end of the process the driver frees it, and may be gone before this is called.
        weakref.finalize(self, _driver().cuMemFree_v2, ctypes.c_uint64(self.address)).atexit = False


class CudaIpcBuffer:
    """`nbytes` zeroed bytes on a GPU, to be mapped by other processes by `ipc_handle`."""

    def __init__(self, name: str, nbytes: int, device: torch.device) -> None:
        """CapacityError when they do not fit."""
        _use(device)
        allocation = _Allocation(nbytes)
        handle = _Handle()
        code = _driver().cuIpcGetMemHandle(
            ctypes.byref(handle), ctypes.c_uint64(allocation.address)
        )
        _check("cuIpcGetMemHandle", code)
        self._name = name
        self.nbytes = nbytes
        self.ipc_handle = bytes(handle.reserved)
        self._tensor: torch.Tensor | None = torch.as_tensor(allocation, device=device)
        self._tensor.zero_()
        torch.cuda.synchronize(device)  # a peer may write at once, and must not be overwritten

    @property
    def name(self) -> str:
        return self._name

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise InvariantError("buffer used after close()", value=self._name)
        return self._tensor

    def close(self) -> None:
        self._tensor = None


class CudaIpcMapping:
    """Another process's memory, as kernels on `device` can write to it. Close it after the last."""

    def __init__(self, ipc_handle: bytes, nbytes: int, device: torch.device) -> None:
        """StartupError if it cannot be mapped, or holds less than `nbytes`."""
        _use(device)
        self._device = device
        pointer = ctypes.c_uint64()
        code = _driver().cuIpcOpenMemHandle_v2(
            ctypes.byref(pointer),
            _Handle.from_buffer_copy(ipc_handle),
            ctypes.c_uint(_ENABLE_PEER_ACCESS),
        )
        _check("cuIpcOpenMemHandle", code)
        self.address = pointer.value
        self.nbytes = nbytes
        begin, found_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        code = _driver().cuMemGetAddressRange_v2(
            ctypes.byref(begin), ctypes.byref(found_bytes), ctypes.c_uint64(self.address)
        )
        try:
            _check("cuMemGetAddressRange", code)
            if begin.value + found_bytes.value < self.address + nbytes:
                raise StartupError(
                    "size of a peer's GPU memory",
                    value=f"{found_bytes.value} bytes",
                    allowed=f"the {nbytes} bytes that were announced, or more",
                )
        except StartupError:
            self.close()
            raise

    def close(self) -> None:
        """Unmap it; no kernel may be writing to it."""
        _use(self._device)
        _driver().cuIpcCloseMemHandle(ctypes.c_uint64(self.address))


def _use(device: torch.device) -> None:
    """Make the device the one that the driver's calls of this thread mean."""
    torch.cuda.set_device(device)
    # torch leaves out what looks done already. A call to the runtime binds the device's context to
    # this thread; this one waits for nothing, as its caller may hold a lock that writes need.
    torch.cuda.current_stream(device).query()


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise StartupError(f"cannot load NVIDIA's driver library: {error}") from error


def _check(call: str, code: int) -> None:
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        said = name.value.decode() if name.value else "unknown"
        raise StartupError(
            f"{call} of NVIDIA's driver failed",
            value=f"{said} ({code})",
            change="check that all processes are on one host and see the same GPUs",
        )
