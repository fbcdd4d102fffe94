"""What a seed decides before a run begins: sizes, requests, what is broken and when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from cp_shared_kv.engine.config_values import RouterPolicy
from cp_shared_kv.testing.world.answers import expected_answer

PAGE_SIZE = 4
CONTEXT_LENGTH = 400
START_SECONDS = 2.0
"""By then every process is up; nothing is asked or broken before."""

Kind = Literal["calm", "messages", "writes", "crashes", "stops", "everything"]


@dataclass(frozen=True)
class Shape:
    """How large the engine is."""

    groups: int
    workers: int
    cp_size: int
    physical_pages: int
    """Of each rank."""
    decode_pages: int
    chunk_tokens: int
    max_prefix_pages: int
    max_running: int
    max_queued: int | None
    prefix_caching: bool
    router_policy: RouterPolicy
    verify: bool
    """Pages travel with checksums."""

    @property
    def longest_prompt_tokens(self) -> int:
        """Of a prompt that is to give one token."""
        logical_tokens = self.physical_pages * self.cp_size * PAGE_SIZE
        return min(logical_tokens, self.most_tokens - 1)

    @property
    def most_tokens(self) -> int:
        """Prompt and output together."""
        return min(self.decode_pages * PAGE_SIZE, CONTEXT_LENGTH)


@dataclass(frozen=True)
class Odds:
    """How messages and writes fare until the calm."""

    delay_seconds: float
    spike: float
    """How many of the delays are of another order."""
    spike_seconds: float
    lost: float
    doubled: float
    reordered: float
    write_seconds: float
    """0: a write has ended when it returns, as in shared memory."""
    broken: float
    stray: float
    """Of the broken writes, those that may land after their failure was reported."""
    damaged: float
    """Of the others, those that change on their way; only where pages have checksums."""
    slow_call: float
    """Of the calls that may wait for another process, those that do."""


@dataclass(frozen=True)
class Strike:
    """A process is killed, or stopped for a while."""

    at_seconds: float
    unit: str
    choice: float
    """Which process of the unit, as a share."""
    stopped_seconds: float | None
    """None: killed."""


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a client, who may leave before it is answered."""

    at_seconds: float
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    patience_seconds: float | None
    enough_tokens: int | None
    """After so many it has met a stop string and wants no more."""


@dataclass(frozen=True)
class Plan:
    """All of it. After `calm_seconds` nothing breaks any more."""

    seed: int
    kind: Kind
    shape: Shape
    odds: Odds
    strikes: tuple[Strike, ...]
    requests: tuple[PlannedRequest, ...]
    watchdog_seconds: float
    calm_seconds: float

    @property
    def quiet_seconds(self) -> float:
        """From then on nothing is stopped either."""
        stops = [
            strike.at_seconds + min(strike.stopped_seconds, self.watchdog_seconds)
            for strike in self.strikes
            if strike.stopped_seconds is not None
        ]
        return max([self.calm_seconds, *stops])


def make_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"plan {seed}")  # noqa: S311
    kinds: list[Kind] = ["calm", "messages", "writes", "crashes", "stops", "everything"]
    kind = rng.choices(kinds, [1, 2, 3, 4, 2, 4])[0]
    shape = _shape(rng)
    often_long = 8 if kind == "stops" else 1
    span_seconds = rng.choices([0.05, 0.5, 2.0, 6.0, 40.0], [4, 4, 4, 2, often_long])[0]
    struck_seconds = span_seconds + rng.choice([0.1, 1.0, 4.0])
    strikes = _strikes(rng, kind, shape, struck_seconds)
    return Plan(
        seed,
        kind,
        shape,
        _odds(rng, kind, shape),
        strikes,
        _requests(rng, shape, span_seconds),
        watchdog_seconds=rng.choice([3.0, 8.0, 60.0] if often_long == 1 else [8.0, 60.0]),
        calm_seconds=START_SECONDS + struck_seconds,
    )


def _shape(rng: random.Random) -> Shape:
    groups, workers = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (2, 2)])
    cp_size = rng.choice([1, 2, 2, 2, 3, 4])
    return Shape(
        groups=groups,
        workers=workers,
        cp_size=cp_size,
        physical_pages=rng.randint(2 if cp_size > 1 else 3, 6),
        decode_pages=rng.randint(3, 16),
        chunk_tokens=rng.choice([2, 5, 8, 16, 40]),
        max_prefix_pages=rng.randint(2, 8),
        max_running=rng.randint(1, 4),
        max_queued=rng.choice([None, None, None, 1, 3]),
        prefix_caching=rng.random() < 0.85,
        router_policy=rng.choice(["longest_prefix", "longest_prefix", "least_loaded"]),
        verify=rng.random() < 0.25,
    )


def _odds(rng: random.Random, kind: Kind, shape: Shape) -> Odds:
    messages = kind in ("messages", "everything")
    writes = kind in ("writes", "everything")
    return Odds(
        delay_seconds=rng.choice([0.0002, 0.001, 0.01]),
        spike=rng.choice([0.0, 0.02, 0.1]),
        spike_seconds=rng.choice([0.05, 0.5, 2.0]),
        lost=rng.choice([0.05, 0.2, 0.5]) if messages else 0.0,
        doubled=rng.choice([0.0, 0.1, 0.4]) if messages else 0.0,
        reordered=rng.choice([0.0, 0.3, 1.0]) if messages else 0.0,
        write_seconds=rng.choice([0.0, 0.001, 0.02, 0.1]),
        broken=rng.choice([0.05, 0.2, 0.5]) if writes else 0.0,
        stray=rng.choice([0.0, 0.5, 1.0]) if writes else 0.0,
        damaged=rng.choice([0.1, 0.3]) if writes and shape.verify else 0.0,
        slow_call=rng.choice([0.0, 0.1, 0.4]),
    )


def _strikes(
    rng: random.Random, kind: Kind, shape: Shape, until_seconds: float
) -> tuple[Strike, ...]:
    kills = rng.randint(1, 4) if kind in ("crashes", "everything") else 0
    stops = rng.randint(1, 3) if kind in ("stops", "everything") else 0
    units = [f"prefill-{i}" for i in range(shape.groups)]
    units += [f"decode-{i}" for i in range(shape.workers)]
    units += ["server-0"] if rng.random() < 0.4 else []
    strikes = [
        Strike(
            START_SECONDS + rng.random() * until_seconds,
            rng.choice(units),
            rng.random(),
            None if is_kill else rng.choice([0.1, 1.0, 5.0, 20.0]) * (0.5 + rng.random()),
        )
        for is_kill in [True] * kills + [False] * stops
    ]
    return tuple(sorted(strikes, key=lambda strike: strike.at_seconds))


def _requests(rng: random.Random, shape: Shape, span_seconds: float) -> tuple[PlannedRequest, ...]:
    families = [tuple(rng.choices(range(4), k=80)) for _ in range(rng.randint(1, 3))]
    impatient = rng.choice([0.0, 0.1, 0.4])
    planned: list[PlannedRequest] = []
    for _ in range(rng.randint(3, 16)):
        tokens, max_tokens = _sizes(rng, shape)
        base = rng.choice(families)
        if planned and rng.random() < 0.25:  # the next turn of a conversation
            before = rng.choice(planned)
            answer, _ = expected_answer(before.prompt, before.max_tokens, before.ignore_eos)
            base = before.prompt + tuple(answer)
        kept = min(rng.choice([0, 4, 8, 13, 30, 80]), tokens - 1, len(base))
        tail = rng.choices(range(4), k=tokens - kept)
        patience = rng.choice([0.0, 0.002, 0.02, 0.2, 2.0]) * rng.random()
        planned.append(
            PlannedRequest(
                START_SECONDS + rng.random() * span_seconds,
                (*base[:kept], *tail),
                max_tokens,
                ignore_eos=rng.random() < 0.5,
                patience_seconds=patience if rng.random() < impatient else None,
                enough_tokens=rng.randint(1, max_tokens) if rng.random() < 0.15 else None,
            )
        )
    return tuple(planned)


def _sizes(rng: random.Random, shape: Shape) -> tuple[int, int]:
    """Prompt tokens and max_tokens: small, middling, exactly what fits, and one over."""
    longest, most = shape.longest_prompt_tokens, shape.most_tokens
    match rng.choices(["small", "middling", "prompt", "total", "over"], [3, 5, 1, 1, 0.5])[0]:
        case "small":
            tokens, more = rng.randint(1, PAGE_SIZE), rng.randint(1, 6)
        case "middling":
            tokens, more = rng.randint(1, longest), rng.randint(1, 8)
        case "prompt":
            return longest, 1
        case "total":
            tokens = rng.randint(max(1, min(longest, most - 9)), longest)
            return tokens, most - tokens
        case _:
            return rng.choice([(longest + 1, 1), (longest, most - longest + 1)])
    return tokens, min(more, most - tokens)
