"""Who asks when: requests at the times of the trace, or users who wait for their answers."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.planner.ranges import check_above_zero, check_at_least
from cp_shared_kv.planner.trace import Trace


@dataclass(frozen=True, slots=True)
class Ask:
    """A row of the trace that is sent at a time, by a user of a closed loop or by nobody."""

    at_seconds: float
    row: int
    instance: int
    """Numbers the conversations in the order in which they were begun."""
    user: int = -1


class Arrivals(ABC):
    """A source of at most `requests` requests."""

    @abstractmethod
    def first(self) -> list[Ask]:
        """What is asked before any answer."""

    @abstractmethod
    def next_arrival(self, ask: Ask) -> Ask | None:
        """What arrives behind this arrival, whatever becomes of it."""

    @abstractmethod
    def answered(self, ask: Ask, now_seconds: float) -> Ask | None:
        """What its user asks next, now that the answer is there."""


class OpenLoop(Arrivals):
    """Requests at recorded times, however long answers take.

    A trace whose times count from each conversation's start needs `conversation_every_seconds`: the
    mean of exponential distances between starts, dealt in random order. `speed` divides times.
    """

    def __init__(
        self,
        trace: Trace,
        requests: int,
        *,
        speed: float = 1.0,
        conversation_every_seconds: float | None = None,
        seed: int = 0,
    ) -> None:
        check_above_zero("--speed", speed)
        every = conversation_every_seconds
        check_above_zero("--conversation-every", every)
        if trace.absolute_times and every is not None:
            raise ConfigError(
                "--conversation-every is for traces of conversations",
                value=every,
                change=f"drop it: {trace.name} has times of its own; --speed stretches them",
            )
        if not trace.absolute_times and every is None:
            raise ConfigError(
                f"{trace.name} has times within each conversation, but none between them",
                change="give --conversation-every SECONDS, or --users for a closed loop",
            )
        self._trace, self._requests, self._speed = trace, requests, speed
        self._every = every or 0.0
        self._random = np.random.default_rng(seed)
        self._asks = self._in_order()

    def first(self) -> list[Ask]:
        return [ask for ask in (self._next(),) if ask is not None]

    def next_arrival(self, ask: Ask) -> Ask | None:  # noqa: ARG002  (a closed loop needs it)
        return self._next()

    def answered(self, ask: Ask, now_seconds: float) -> Ask | None:  # noqa: ARG002
        return None

    def _next(self) -> Ask | None:
        if self._requests == 0:
            return None
        self._requests -= 1
        return next(self._asks, None)

    def _in_order(self) -> Iterator[Ask]:
        trace = self._trace
        if trace.absolute_times:
            for row, at in enumerate(trace.at_seconds.tolist()):
                yield Ask(at / self._speed, row, row)
            return
        # A heap of the conversations under way, by the time of their next request.
        begun: list[tuple[float, int, int, int]] = []
        starts, deck = 0.0, _deck(trace, self._random)
        for instance in count():
            starts += float(self._random.exponential(self._every))
            while begun and begun[0][0] <= starts:
                yield self._of_heap(begun)
            rows = trace.rows(next(deck))
            heapq.heappush(begun, (starts, instance, rows.start, rows.stop))

    def _of_heap(self, begun: list[tuple[float, int, int, int]]) -> Ask:
        at, instance, row, stop = heapq.heappop(begun)
        if row + 1 < stop:
            times = self._trace.at_seconds
            gap = max(0.0, float(times[row + 1] - times[row])) / self._speed
            heapq.heappush(begun, (at + gap, instance, row + 1, stop))
        return Ask(at, row, instance)


class ClosedLoop(Arrivals):
    """`users` who hold one conversation after the other and think before each next request.

    They begin evenly spread over `ramp_seconds`. Conversations are dealt in random order, and again
    when all were; a trace without conversations is dealt in its own order. Thinking is the recorded
    time, at most `longest_think_seconds`.
    """

    def __init__(
        self,
        trace: Trace,
        requests: int,
        *,
        users: int,
        longest_think_seconds: float,
        ramp_seconds: float = 0.0,
        seed: int = 0,
    ) -> None:
        check_at_least("--users", users, 1)
        check_at_least("--longest-think", longest_think_seconds, 0)
        check_at_least("--ramp", ramp_seconds, 0)
        self._trace, self._requests = trace, requests
        self._users, self._longest_think = users, longest_think_seconds
        self._ramp = ramp_seconds
        random = np.random.default_rng(seed)
        self._deck = _deck(trace, None if trace.absolute_times else random)
        self._instances = count()
        self._stop: dict[int, int] = {}

    def first(self) -> list[Ask]:
        step = self._ramp / self._users
        asks = (self._begin(user * step, user) for user in range(self._users))
        return [ask for ask in asks if ask is not None]

    def next_arrival(self, ask: Ask) -> Ask | None:  # noqa: ARG002  (an open loop needs it)
        return None

    def answered(self, ask: Ask, now_seconds: float) -> Ask | None:
        row = ask.row + 1
        if row == self._stop[ask.user]:
            return self._begin(now_seconds, ask.user)
        if self._requests == 0:
            return None
        self._requests -= 1
        think = min(float(self._trace.think_seconds[row]), self._longest_think)
        return Ask(now_seconds + think, row, ask.instance, ask.user)

    def _begin(self, now_seconds: float, user: int) -> Ask | None:
        if self._requests == 0:
            return None
        self._requests -= 1
        rows = self._trace.rows(next(self._deck))
        self._stop[user] = rows.stop
        return Ask(now_seconds, rows.start, next(self._instances), user)


def _deck(trace: Trace, random: np.random.Generator | None) -> Iterator[int]:
    """Conversations without end: each once, in random order if there is one, then again."""
    order = np.arange(trace.conversations)
    if random is not None:
        order = random.permutation(trace.conversations)
    while True:
        yield from order.tolist()
