"""What the reads need of a CP group: a byte all-gather and a barrier."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

# torch 2.13 gives the call a new name and warns of the old one, which is all that 2.11 has.
_ALL_GATHER = (
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)


class CPGroup(Protocol):
    """The N ranks that share one logical pool, as one of them sees it."""

    @property
    def cp_rank(self) -> int: ...
    @property
    def cp_size(self) -> int: ...

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        """Fill out u8[N, n] with every rank's local u8[n], by rank; both contiguous.

        Collective: every rank calls it, in the same order, with the same n.
        """
        ...

    def barrier(self) -> None:
        """Return when every rank has called it; what each wrote to shared memory is then seen."""
        ...


class TorchGroup:
    """A CP group over a torch.distributed process group (gloo on CPU)."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self.cp_rank = process_group.rank()
        self.cp_size = process_group.size()

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        getattr(dist, _ALL_GATHER)(out.view(-1), local, group=self._group)

    def barrier(self) -> None:
        dist.barrier(self._group)


class GpuGroup(TorchGroup):
    """A CP group whose bytes in host memory go over one process group, those on GPUs over NCCL."""

    def __init__(
        self, host: dist.ProcessGroup, gpus: dist.ProcessGroup, *, ranks_share_gpus: bool = False
    ) -> None:
        super().__init__(host)
        self.host_process_group = host
        self.gpu_process_group = gpus
        self.ranks_share_gpus = ranks_share_gpus
        """Whether there are fewer GPUs than ranks, so that symmetric memory cannot be had."""

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        getattr(dist, _ALL_GATHER)(
            out.view(-1),
            local,
            group=self.gpu_process_group if local.is_cuda else self.host_process_group,
        )

    def barrier(self) -> None:
        torch.cuda.synchronize()
        super().barrier()


class SoloGroup:
    """A group of one rank, without torch.distributed."""

    cp_rank = 0
    cp_size = 1

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        out[0].copy_(local)

    def barrier(self) -> None:
        pass
