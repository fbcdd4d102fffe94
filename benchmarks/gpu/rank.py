"""One rank of a measurement: its GPU, its NCCL group, and how ranks set out together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from benchmarks.gpu.clock import GpuClock
from cp_shared_kv.memory.symmetric_buffers import SymmetricBuffer, why_not_mapped
from cp_shared_kv.reads.group import TorchGroup
from cp_shared_kv.testing.rank_process import RankContext


@dataclass
class GpuRank(GpuClock):
    """A rank with a GPU of its own. Its clock lines the ranks up: `samples` is collective."""

    context: RankContext

    def __post_init__(self) -> None:
        torch.cuda.set_device(self.device)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.context.rank)

    @cached_property
    def nccl_process_group(self) -> dist.ProcessGroup:
        """The ranks of this call over NCCL, made at its first use. Collective then."""
        group = dist.new_group(list(range(self.context.size)), backend="nccl")
        assert isinstance(group, dist.ProcessGroup)
        return group

    @cached_property
    def nccl(self) -> TorchGroup:
        return TorchGroup(self.nccl_process_group)

    @cached_property
    def _meeting_place(self) -> SymmetricBuffer:
        return self.buffer(16)

    def buffer(self, nbytes: int) -> SymmetricBuffer:
        """Memory that all ranks map. Collective."""
        reason = why_not_mapped(self.context.process_group, self.device)
        if reason is not None:
            raise RuntimeError(f"peers cannot be mapped: {reason}")
        return SymmetricBuffer.create(nbytes, self.context.process_group, self.device)

    def meet_on_hosts(self) -> None:
        self.context.group.barrier()

    def meet_on_stream(self) -> None:
        self._meeting_place.barrier()


def slowest(of_ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Each sample as its slowest rank took it: a forward pass waits for that one."""
    return {
        name: [max(round_) for round_ in zip(*(rank[name] for rank in of_ranks), strict=True)]
        for name in of_ranks[0]
    }
