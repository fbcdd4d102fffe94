"""One run: a trace through prefill groups of the engine's own parts, on a clock that jumps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Literal

from cp_shared_kv.engine.budget import SCRATCH_LAYERS
from cp_shared_kv.engine.config_values import RouterPolicy
from cp_shared_kv.errors import ConfigError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.planner.arrivals import Arrivals, Ask
from cp_shared_kv.planner.clock import EventClock
from cp_shared_kv.planner.cost_model import CostModel
from cp_shared_kv.planner.decode_side import DecodeSide
from cp_shared_kv.planner.front import Front
from cp_shared_kv.planner.outcome import Outcome
from cp_shared_kv.planner.prefill_group import GroupHooks, PrefillGroup
from cp_shared_kv.planner.ranges import check_at_least
from cp_shared_kv.planner.simulated_request import SimulatedRequest
from cp_shared_kv.planner.trace import Trace
from cp_shared_kv.planner.trace_keys import TraceKeys

AnswerTimes = Literal["modelled", "recorded"]
Progress = Callable[[int], None]
"""Told how many requests have their first token or were refused."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated, apart from the trace and who asks.

    `answers`: modelled, an answer ends `decode_seconds_per_token` a token after its first;
    recorded, it takes as long as in the trace, or until its first token where that is later.
    `decode_tokens`: with it, decode's pool of each group is simulated too, so that requests may
    wait for it and descriptors are counted.
    """

    capacity: KVCapacity
    costs: CostModel
    context_length: int
    chunk_tokens: int = 8192
    groups: int = 1
    router_policy: RouterPolicy = "longest_prefix"
    answers: AnswerTimes = "modelled"
    decode_seconds_per_token: float = 0.02
    decode_tokens: int | None = None

    def __post_init__(self) -> None:
        check_at_least("--chunked-prefill-size", self.chunk_tokens, 1)
        check_at_least("--prefill-groups", self.groups, 1)
        check_at_least("--decode-ms-per-token", 1000 * self.decode_seconds_per_token, 0)

    @property
    def max_prefix_pages(self) -> int:
        """As the engine sizes scratch: two layers of the longest prefix, of the pool at most."""
        longest = min(self.capacity.logical_tokens, self.context_length)
        longest_pages = -(-longest // self.capacity.page_size)
        return min(self.capacity.logical_pages, SCRATCH_LAYERS * longest_pages)


class Simulation:
    """Runs a scenario once."""

    def __init__(
        self,
        scenario: Scenario,
        trace: Trace,
        arrivals: Arrivals,
        on_progress: Progress | None = None,
    ) -> None:
        if scenario.answers == "recorded" and not trace.has_answer_times:
            raise ConfigError(
                f"--answers recorded: {trace.name} has no answer times", change="use modelled"
            )
        self._scenario, self._trace, self._arrivals = scenario, trace, arrivals
        self._on_progress = on_progress
        self._clock = EventClock()
        self._outcome = Outcome(short_tokens=scenario.chunk_tokens)
        capacity = scenario.capacity
        self._keys = TraceKeys(trace, capacity.page_size)
        self._layout = CpSharedKVLayout(
            capacity.page_size, capacity.cp_size, 0, capacity.stripe_pages, capacity.physical_pages
        )
        self._front = Front(scenario.router_policy, scenario.groups, capacity)
        hooks = GroupHooks(self._admitted, self._prefilled)
        self._groups = [self._group(hooks) for _ in range(scenario.groups)]
        self._rooms = count()

    def run(self) -> Outcome:
        """All requests to their end. InvariantError if any book does not balance then."""
        started = time.process_time()
        for ask in self._arrivals.first():
            self._expect(ask)
        self._clock.run()
        outcome = self._outcome
        self._front.check_invariants()
        for group in self._groups:
            group.check_invariants()
            outcome.evicted_pages += group.pool.evicted_pages_total
            outcome.busy_seconds += group.figures.busy_seconds / len(self._groups)
            outcome.batches += group.figures.batches
        outcome.makespan_seconds = self._clock.now_seconds
        outcome.cpu_seconds = time.process_time() - started
        return outcome

    def _group(self, hooks: GroupHooks) -> PrefillGroup:
        scenario = self._scenario
        decode = None
        if scenario.decode_tokens is not None:
            decode = DecodeSide(scenario.decode_tokens, scenario.capacity)
        return PrefillGroup(
            self._clock,
            scenario.capacity,
            scenario.costs,
            hooks,
            chunk_tokens=scenario.chunk_tokens,
            max_prefix_pages=scenario.max_prefix_pages,
            decode=decode,
        )

    def _expect(self, ask: Ask | None) -> None:
        if ask is not None:
            self._clock.at(ask.at_seconds, lambda: self._arrive(ask))

    def _arrive(self, ask: Ask) -> None:
        self._expect(self._arrivals.next_arrival(ask))
        prompt_tokens = int(self._trace.prompt_tokens[ask.row])
        output_tokens = int(self._trace.output_tokens[ask.row])
        reason = self._too_long(prompt_tokens, max(1, output_tokens))
        if reason is not None:
            self._outcome.refuse(prompt_tokens, reason)
            self._count()
            # Its user goes on as if it had been answered, so that runs stay comparable.
            ends = self._answer_ends(ask, ask.at_seconds, output_tokens)
            self._expect(self._arrivals.answered(ask, ends))
            return
        request = SimulatedRequest(
            room=next(self._rooms),
            ask=ask,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            page_keys=self._keys.page_keys(ask.row, ask.instance),
        )
        request.group = self._front.choose(request)
        self._groups[request.group].submit(request)

    def _too_long(self, prompt_tokens: int, output_tokens: int) -> str | None:
        """Which of the engine's limits a request exceeds, as its front door checks them."""
        scenario = self._scenario
        if prompt_tokens > scenario.capacity.logical_tokens:
            return "logical_tokens"
        if prompt_tokens + output_tokens > scenario.context_length:
            return "context_length"
        decode_tokens = scenario.decode_tokens
        if decode_tokens is not None and prompt_tokens + output_tokens > decode_tokens:
            return "decode_tokens"
        return None

    def _admitted(self, _request: SimulatedRequest, pages: LogicalPages) -> None:
        self._outcome.admit(self._layout, pages)

    def _prefilled(self, request: SimulatedRequest) -> None:
        self._front.prefilled(request)
        now = self._clock.now_seconds
        self._outcome.serve(request, now)
        self._count()
        ends = self._answer_ends(request.ask, now, request.output_tokens)
        self._clock.at(ends, lambda: self._ended(request))

    def _ended(self, request: SimulatedRequest) -> None:
        self._front.answered(request)
        self._groups[request.group].answered(request)
        self._expect(self._arrivals.answered(request.ask, self._clock.now_seconds))

    def _answer_ends(self, ask: Ask, first_token_seconds: float, output_tokens: int) -> float:
        if self._scenario.answers == "modelled":
            return first_token_seconds + output_tokens * self._scenario.decode_seconds_per_token
        recorded = float(self._trace.answer_seconds[ask.row])
        if recorded != recorded:  # NaN: this one answer's time is not in the trace
            recorded = 0.0
        return max(first_token_seconds, ask.at_seconds + recorded)

    def _count(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._outcome.requests)
