"""How an operation is timed on a GPU: by events, in rounds in which all operations take turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

WARM_UPS = 2
HEAD_START_CYCLES = 2_000_000
HOST_HEAD_START_CYCLES = 20_000_000
"""1 and 10 ms, in which the hosts queue all there is to do. Else the ranks would wait for whichever
host is late, and count it as time of what is measured."""


@dataclass(kw_only=True)
class GpuClock:
    """Of the current GPU, which here is the only one."""

    operations: dict[str, tuple[Callable[[], object], int, bool]] = field(default_factory=dict)
    """By name: what a sample runs, how often it does the operation, and whether a host does."""

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
        """Seconds of one operation, in each round all of them in turn."""
        taken: dict[str, list[float]] = {name: [] for name in self.operations}
        for turn in range(rounds + WARM_UPS):
            for name, (run, repeats, by_host) in self.operations.items():
                seconds = self._time(run, by_host) / repeats
                if turn >= WARM_UPS:
                    taken[name].append(seconds)
        self.operations.clear()
        return taken

    def meet_on_hosts(self) -> None:
        """Wait for the hosts of all ranks."""

    def meet_on_stream(self) -> None:
        """Have the current stream wait for those of all ranks: the GPUs set out together."""

    def _warm_up(self, operation: Callable[[int], object], sets: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for turn in range(sets):
                operation(turn)
        torch.cuda.synchronize()
        self.meet_on_hosts()

    def _time(self, run: Callable[[], object], by_host: bool) -> float:
        # Not the default stream, on which the driver refuses batches of copies.
        with torch.cuda.stream(self._stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.meet_on_hosts()
            torch.cuda._sleep(HOST_HEAD_START_CYCLES if by_host else HEAD_START_CYCLES)
            self.meet_on_stream()
            start.record()
            run()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()
