"""One host's GPUs: the peer's pool is mapped into this process, and a write is one kernel."""

from __future__ import annotations

import queue
import threading

import numpy as np
import torch

from cp_shared_kv.errors import TransferError
from cp_shared_kv.kernels import ALIGNMENT_BYTES, WORD_BYTES
from cp_shared_kv.memory.buffers import Buffer
from cp_shared_kv.memory.cuda_ipc import CudaIpcBuffer, CudaIpcMapping
from cp_shared_kv.memory.device_copy import to_device
from cp_shared_kv.transfer.mapped_target import MappedTarget
from cp_shared_kv.transfer.mapped_transport import Ended, MappedTransport
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import Runs


class CudaIpcTransport(MappedTransport[torch.Tensor, CudaIpcMapping]):
    """KVTransport between GPUs of one host, or on one GPU between processes.

    A write waits, on its own stream, for all that was queued on the current stream before it; the
    caller's host goes on. Its future is done once the GPU has made the copy. Offsets and lengths
    that are no multiples of 16 bytes are refused (`unaligned`).
    """

    END_SECONDS = 30.0

    def __init__(self, session_id: str, device: torch.device) -> None:
        """`device`: the GPU that registered buffers are on."""
        super().__init__(session_id, lambda tensor: tensor)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copies: queue.SimpleQueue[tuple[torch.cuda.Event, Ended]] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="GPU copies", daemon=True).start()

    def _attach(self, region: Region) -> CudaIpcMapping:
        if not region.ipc_handle:
            raise TransferError(
                "region of a peer that is in no GPU's memory",
                kind="unreachable",
                peer=self.session_id,
                quiescent=True,
                value=region.name,
            )
        return CudaIpcMapping(bytes.fromhex(region.ipc_handle), region.nbytes, self._device)

    def _detach(self, memory: CudaIpcMapping) -> None:
        memory.close()

    def _copy(self, local: torch.Tensor, remote: CudaIpcMapping, runs: Runs, ended: Ended) -> None:
        # Here, since without a GPU there need not be a triton.
        from cp_shared_kv.kernels.copy_runs import copy_runs

        distance = remote.address - local.data_ptr()
        ranges = np.stack(
            (runs.local_offset_bytes, runs.remote_offset_bytes + distance, runs.nbytes)
        )
        if (ranges % ALIGNMENT_BYTES).any():
            raise TransferError(
                f"range to copy between GPUs is not whole multiples of {ALIGNMENT_BYTES} bytes",
                kind="unaligned",
                peer=self.session_id,
                quiescent=True,
            )
        longest_words = int(runs.nbytes.max(initial=0)) // WORD_BYTES
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            words = to_device(torch.from_numpy(ranges // WORD_BYTES), self._device)
            copy_runs(local, words, longest_words)
            landed = torch.cuda.Event(blocking=True)
            landed.record(self._stream)
        self._copies.put((landed, ended))

    def _watch(self) -> None:
        """Tell of each copy when the GPU has made it, in the order in which they were begun."""
        while True:
            landed, ended = self._copies.get()
            try:
                landed.synchronize()
            except RuntimeError as error:  # a fault of the GPU, which no later call survives
                ended(
                    TransferError(
                        f"copy between GPUs failed: {error}",
                        kind="unreachable",
                        peer=self.session_id,
                        quiescent=False,
                    )
                )
            else:
                ended(None)


class CudaIpcTarget(MappedTarget):
    """KVTarget on a GPU: peers map it by the handle in its region.

    The driver ends a process's kernels, and so its copies, before it counts as ended.
    """

    def _region(self, buffer: Buffer) -> Region | None:
        if not isinstance(buffer, CudaIpcBuffer):
            return None
        return Region(buffer.name, buffer.nbytes, ipc_handle=buffer.ipc_handle.hex())
