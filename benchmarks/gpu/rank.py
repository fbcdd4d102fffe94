"""One rank of a measurement: its GPU, its NCCL group, and how an operation is timed on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from cp_shared_kv.memory.symmetric_buffers import SymmetricBuffer, why_not_mapped
from cp_shared_kv.reads.group import TorchGroup
from cp_shared_kv.testing.rank_process import RankContext

WARM_UPS = 2
HEAD_START_CYCLES = 2_000_000
HOST_HEAD_START_CYCLES = 20_000_000
"""1 and 10 ms, in which the hosts queue all there is to do. Else the ranks would wait for whichever
host is late, and count it as time of what is measured."""


@dataclass
class GpuRank:
    """A rank with a GPU of its own."""

    context: RankContext
    operations: dict[str, tuple[Callable[[], object], int, bool]] = field(default_factory=dict)
    """By name: what a sample runs, how often it does the operation, and whether a host does."""

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

    def capture(
        self, name: str, operation: Callable[[int], object], sets: int, repeats: int = 8
    ) -> None:
        """Record so many repeats in a graph, so that no launch by the host is timed.

        They go round the sets of data 0..sets-1, together more than the L2 cache holds.
        """
        self._warm_up(operation, sets)
        repeats = max(sets, repeats)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for turn in range(repeats):
                operation(turn % sets)
        self.operations[name] = graph.replay, repeats, False

    def launch(self, name: str, operation: Callable[[int], object], sets: int) -> None:
        """The same for what no graph can hold: one round of the sets, queued by the host."""
        self._warm_up(operation, sets)

        def run() -> None:
            for turn in range(sets):
                operation(turn)

        self.operations[name] = run, sets, True

    def samples(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of one operation, in each round all of them in turn. Collective."""
        taken: dict[str, list[float]] = {name: [] for name in self.operations}
        for turn in range(rounds + WARM_UPS):
            for name, (run, repeats, by_host) in self.operations.items():
                seconds = self._time(run, by_host) / repeats
                if turn >= WARM_UPS:
                    taken[name].append(seconds)
        self.operations.clear()
        return taken

    def _warm_up(self, operation: Callable[[int], object], sets: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for turn in range(sets):
                operation(turn)
        torch.cuda.synchronize()
        self.context.group.barrier()

    def _time(self, run: Callable[[], object], by_host: bool) -> float:
        # Not the default stream, on which the driver refuses batches of copies.
        with torch.cuda.stream(self._stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.context.group.barrier()
            torch.cuda._sleep(HOST_HEAD_START_CYCLES if by_host else HEAD_START_CYCLES)
            self._meeting_place.barrier()  # on the stream: the GPUs set out together
            start.record()
            run()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()


def slowest(of_ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Each sample as its slowest rank took it: a forward pass waits for that one."""
    return {
        name: [max(round_) for round_ in zip(*(rank[name] for rank in of_ranks), strict=True)]
        for name in of_ranks[0]
    }
