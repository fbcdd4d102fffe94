"""Many runs of one trace: pool multipliers against user counts."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cp_shared_kv.engine.config_values import RouterPolicy
from cp_shared_kv.errors import ConfigError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.pool_sizes import PoolSizes
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.planner.arrivals import Arrivals, ClosedLoop, OpenLoop
from cp_shared_kv.planner.cost_model import CostModel
from cp_shared_kv.planner.outcome import Outcome
from cp_shared_kv.planner.ranges import check_at_least
from cp_shared_kv.planner.rates import Rates
from cp_shared_kv.planner.simulate import AnswerTimes, Scenario, Simulation
from cp_shared_kv.planner.trace import Trace
from cp_shared_kv.planner.weight_bytes import WeightBytes, WeightSplit

LONGEST_THINK_SECONDS = 1800.0
MOST_USERS = 1_000_000
MOST_GROUPS = 4096


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What all runs have in common. `users` None is an open loop at recorded times.

    A pool multiplier is how many of the `cp_size` ranks share pages: 1 is a replicated group, N a
    shared one. All ranks compute in any case.
    """

    model: ModelConfig
    weights: WeightBytes
    sizes: PoolSizes
    rates: Rates
    cp_size: int
    physical_tokens: int
    context_length: int
    multipliers: tuple[int, ...]
    users: tuple[int, ...] | None
    requests: int
    chunk_tokens: int = 8192
    groups: int = 1
    router_policy: RouterPolicy = "longest_prefix"
    answers: AnswerTimes = "modelled"
    decode_seconds_per_token: float = 0.02
    descriptors: bool = False
    decode_tokens: int | None = None
    longest_think_seconds: float = LONGEST_THINK_SECONDS
    ramp_seconds: float = 0.0
    speed: float = 1.0
    conversation_every_seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for multiplier in self.multipliers:
            if not 1 <= multiplier <= self.cp_size:
                raise ConfigError(
                    "--pool-multipliers has one that is out of range",
                    value=multiplier,
                    allowed=f"1 to {self.cp_size}, the ranks that can share pages",
                    change="raise --attention-context-parallel-size",
                )
        for users in self.users or ():
            check_at_least("--users", users, 1, MOST_USERS)
        check_at_least("--prefill-groups", self.groups, 1, MOST_GROUPS)
        check_at_least("--requests", self.requests, 1)
        check_at_least("--seed", self.seed, 0)
        check_at_least("--decode-max-total-tokens", self.decode_tokens, 1)
        for flag, given, needed in self._without_effect():
            raise ConfigError(f"{flag} has no effect here", value=given, change=needed)

    def _without_effect(self) -> Iterator[tuple[str, object, str]]:
        """Flags that were given and would do nothing, with what would make them do something."""
        if self.decode_tokens is not None and not self.descriptors:
            yield (
                "--decode-max-total-tokens",
                self.decode_tokens,
                "add --descriptors, which simulates decode's pool, or drop it",
            )
        if self.users is None:
            closed = "give --users for a closed loop, or drop it"
            if self.ramp_seconds:
                yield "--ramp", self.ramp_seconds, closed
            if self.longest_think_seconds != LONGEST_THINK_SECONDS:
                yield "--longest-think", self.longest_think_seconds, closed
            return
        opened = "drop --users for an open loop, or drop it"
        if self.speed != 1.0:
            yield "--speed", self.speed, opened
        if self.conversation_every_seconds is not None:
            yield "--conversation-every", self.conversation_every_seconds, opened

    def cases(self) -> list[Case]:
        """Every multiplier with every number of users."""
        counts: tuple[int | None, ...] = (None,) if self.users is None else self.users
        return [Case(multiplier, users) for users in counts for multiplier in self.multipliers]

    def scenario(self, case: Case) -> Scenario:
        """What is simulated for a case. CapacityError for a pool without a page."""
        capacity = KVCapacity.from_tokens(
            self.physical_tokens, self.sizes.page_size, case.multiplier
        )
        costs = CostModel(
            self.model,
            self.sizes,
            self.rates,
            self.weights,
            WeightSplit(self.cp_size),
            cp_size=self.cp_size,
            owners=case.multiplier,
        )
        decode_tokens = self.decode_tokens or capacity.logical_tokens
        return Scenario(
            capacity=capacity,
            costs=costs,
            context_length=self.context_length,
            chunk_tokens=self.chunk_tokens,
            groups=self.groups,
            router_policy=self.router_policy,
            answers=self.answers,
            decode_seconds_per_token=self.decode_seconds_per_token,
            decode_tokens=decode_tokens if self.descriptors else None,
        )

    def arrivals(self, trace: Trace, case: Case) -> Arrivals:
        """Who asks in a case: the same requests in the same order for every multiplier."""
        if case.users is None:
            return OpenLoop(
                trace,
                self.requests,
                speed=self.speed,
                conversation_every_seconds=self.conversation_every_seconds,
                seed=self.seed,
            )
        return ClosedLoop(
            trace,
            self.requests,
            users=case.users,
            longest_think_seconds=self.longest_think_seconds,
            ramp_seconds=self.ramp_seconds,
            seed=self.seed,
        )

    def as_plain(self) -> dict[str, Any]:
        """The settings, for reports."""
        return {
            "model": self.model.model_type,
            "layers": self.model.num_hidden_layers,
            "index_layers": len(self.model.index_layers),
            "bytes_per_token": self.sizes.bytes_per_token,
            "page_size": self.sizes.page_size,
            "cp_size": self.cp_size,
            "physical_tokens": self.physical_tokens,
            "context_length": self.context_length,
            "requests": self.requests,
            "chunk_tokens": self.chunk_tokens,
            "groups": self.groups,
            "router_policy": self.router_policy,
            "answers": self.answers,
            "decode_seconds_per_token": self.decode_seconds_per_token,
            "descriptors": self.descriptors,
            "decode_tokens": self.decode_tokens,
            "longest_think_seconds": self.longest_think_seconds,
            "ramp_seconds": self.ramp_seconds,
            "speed": self.speed,
            "conversation_every_seconds": self.conversation_every_seconds,
            "seed": self.seed,
            "rates": self.rates.as_plain(),
        }


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a sweep."""

    multiplier: int
    users: int | None

    def __str__(self) -> str:
        who = "recorded times" if self.users is None else f"{self.users} users"
        return f"{self.multiplier}x, {who}"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A case and what it found."""

    case: Case
    logical_tokens: int
    outcome: Outcome

    def as_plain(self) -> dict[str, Any]:
        """One row of a file of results."""
        return {
            "multiplier": self.case.multiplier,
            "users": self.case.users,
            "logical_tokens": self.logical_tokens,
            **self.outcome.as_plain(),
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }


SweepProgress = Callable[[Case, int], None]
"""Told the case that runs and how many of its requests have their first token, or were refused."""


def run_sweep(sweep: Sweep, trace: Trace, on_progress: SweepProgress) -> Iterator[CaseResult]:
    """Run case after case, giving each result as it is there.

    ConfigError and CapacityError for settings that do not go with the trace come before any run.
    """
    cases = sweep.cases()
    prepared = [(sweep.scenario(case), sweep.arrivals(trace, case)) for case in cases]
    for case, (scenario, arrivals) in zip(cases, prepared, strict=True):
        simulation = Simulation(
            scenario, trace, arrivals, lambda done, case=case: on_progress(case, done)
        )
        yield CaseResult(case, scenario.capacity.logical_tokens, simulation.run())
