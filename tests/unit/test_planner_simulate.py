"""Simulated runs, small enough to say beforehand what must come out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cp_shared_kv.errors import CapacityError, ConfigError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.planner.arrivals import ClosedLoop, OpenLoop
from cp_shared_kv.planner.capacity import pool_sizes
from cp_shared_kv.planner.cost_model import CostModel, Span
from cp_shared_kv.planner.gpus import GPUS
from cp_shared_kv.planner.model_catalogue import model_named
from cp_shared_kv.planner.outcome import Outcome
from cp_shared_kv.planner.rates import Rates
from cp_shared_kv.planner.simulate import Scenario, Simulation
from cp_shared_kv.planner.sweep import Case, Sweep, run_sweep
from cp_shared_kv.planner.trace import Trace
from cp_shared_kv.planner.trace_files import read_trace
from cp_shared_kv.planner.weight_bytes import WeightSplit, weight_bytes

PAGE = 64
MODEL = model_named("glm-5.2")
WEIGHTS = weight_bytes(MODEL)
SIZES = pool_sizes(MODEL, "bf16", PAGE)
RATES = Rates.of_gpu(GPUS["h200"])
Conversation = list[tuple[int, int]]
"""(prompt pages, output tokens) of each request, each prompt going on from the one before."""
WriteTrace = Callable[[list[Conversation]], Trace]


@pytest.fixture
def write(tmp_path: Path) -> WriteTrace:
    """Agentic traces whose prompts are whole pages; answers take 2 s, thinking 1 s."""

    def trace_of(conversations: list[Conversation]) -> Trace:
        lines = []
        for turns in conversations:
            reqs = [[0.0, PAGE * pages, out, [[1, pages]], 0, 2.0, 1.0] for pages, out in turns]
            lines.append(json.dumps({"block_size": PAGE, "reqs": reqs}))
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("\n".join(lines))
        return read_trace(path)

    return trace_of


def costs(owners: int) -> CostModel:
    return CostModel(MODEL, SIZES, RATES, WEIGHTS, WeightSplit(8), cp_size=8, owners=owners)


def scenario(pages: int, owners: int = 1, **changes: Any) -> Scenario:
    """A pool of so many logical pages."""
    values: dict[str, Any] = {
        "capacity": KVCapacity.from_tokens(pages // owners * PAGE, PAGE, owners),
        "costs": costs(owners),
        "context_length": 1 << 20,
    }
    return Scenario(**(values | changes))


def run(
    trace: Trace, chosen: Scenario, users: int = 1, requests: int | None = None, seed: int = 0
) -> Outcome:
    loop = ClosedLoop(
        trace,
        requests or trace.requests,
        users=users,
        longest_think_seconds=1800.0,
        seed=seed,
    )
    return Simulation(chosen, trace, loop).run()


# Cache -------------------------------------------------------------------------------------------


def test_a_prompt_finds_the_one_that_it_goes_on_from(write: WriteTrace) -> None:
    found = run(write([[(10, 5), (14, 5)]]), scenario(100))
    assert found.requests == 2
    assert found.prompt_tokens == 24 * PAGE
    assert found.cached_tokens == 10 * PAGE
    assert found.hit_rate == pytest.approx(10 / 24)


def test_the_last_page_of_a_repeated_prompt_is_computed_for_its_logits(write: WriteTrace) -> None:
    found = run(write([[(10, 5), (10, 5)]]), scenario(100))
    assert found.cached_tokens == 9 * PAGE


def test_conversations_share_nothing_though_their_blocks_have_equal_numbers(
    write: WriteTrace,
) -> None:
    found = run(write([[(10, 5)], [(10, 5)], [(10, 5)]]), scenario(100), users=3)
    assert found.cached_tokens == 0


def test_what_the_pool_cannot_keep_is_computed_again(write: WriteTrace) -> None:
    turns = [(10, 5), (10, 5)]
    trace = write([turns, turns])
    roomy, tight = (run(trace, scenario(pages), users=2) for pages in (40, 10))
    assert roomy.cached_tokens == 2 * 9 * PAGE
    assert roomy.evicted_pages == 0
    assert tight.cached_tokens == 0
    assert tight.evicted_pages == 30


@pytest.mark.parametrize("owners", [1, 2, 4, 8])
def test_as_many_owners_give_as_many_times_the_pool(write: WriteTrace, owners: int) -> None:
    """Conversations of ten pages, one of them computed anew each time: 11 a rank are enough."""
    trace = write([[(10, 5)] * 20] * owners)
    found = run(trace, scenario(11 * owners, owners), users=owners)
    assert found.hit_rate == pytest.approx(0.9 * 19 / 20)
    assert found.evicted_pages == 0
    too_small = run(trace, scenario(10 * owners, owners), users=owners)
    assert too_small.evicted_pages > 0


def test_prompts_longer_than_a_limit_are_refused_and_count_as_misses(write: WriteTrace) -> None:
    trace = write([[(5, 5), (20, 5), (6, 5)]])
    found = run(trace, scenario(10))
    assert found.refused == {"logical_tokens": 1}
    assert found.requests == 3
    assert found.prompt_tokens == 31 * PAGE
    assert found.hit_rate == pytest.approx(5 / 31)
    assert found.as_plain()["hit_rate_of_served"] == pytest.approx(5 / 11, abs=1e-4)
    assert len(found.first_token_seconds) == 2
    short = run(trace, scenario(100, context_length=6 * PAGE + 4))
    assert short.refused == {"context_length": 2}
    narrow = run(trace, scenario(100, decode_tokens=10 * PAGE))
    assert narrow.refused == {"decode_tokens": 1}


# Time --------------------------------------------------------------------------------------------


def test_first_token_time_is_that_of_the_batches_and_the_last_transfer(write: WriteTrace) -> None:
    chunk = 4 * PAGE
    found = run(write([[(10, 5)]]), scenario(100, owners=4, chunk_tokens=chunk))
    model = costs(4)
    spans = [Span(0, chunk), Span(chunk, chunk), Span(2 * chunk, 2 * PAGE)]
    batches = [model.batch([span], span.prefix).total for span in spans]
    assert found.batches == 3
    assert found.busy_seconds == pytest.approx(sum(batches))
    expected = sum(batches) + model.transfer_seconds(2)
    assert found.first_token_seconds[0] == pytest.approx(expected)
    assert found.queue_seconds[0] == 0.0


def test_one_after_the_other_where_the_pool_holds_only_one(write: WriteTrace) -> None:
    found = run(write([[(10, 5)]] * 3), scenario(10), users=3)
    prefill = costs(1).batch([Span(0, 10 * PAGE)], 0).total + costs(1).transfer_seconds(10)
    assert sorted(found.queue_seconds) == pytest.approx([0.0, prefill, 2 * prefill])
    assert max(found.first_token_seconds) == pytest.approx(3 * prefill)


def test_an_answer_takes_what_the_model_or_the_recording_says(write: WriteTrace) -> None:
    trace = write([[(1, 1000), (1, 1000)]])
    slow = run(trace, scenario(10, decode_seconds_per_token=0.1))
    recorded = run(trace, scenario(10, answers="recorded"))
    prefill = slow.first_token_seconds
    assert slow.makespan_seconds == pytest.approx(sum(prefill) + 2 * 100 + 1)
    # From arrival to the end of the answer 2 s as recorded, and 1 s to think.
    assert recorded.makespan_seconds == pytest.approx(2 + 1 + 2)


def test_a_recorded_answer_does_not_end_before_its_first_token(write: WriteTrace) -> None:
    trace = write([[(1000, 1), (1001, 1)]])
    slow = replace(RATES, linear_flops=RATES.linear_flops / 1000)
    model = CostModel(MODEL, SIZES, slow, WEIGHTS, WeightSplit(8), cp_size=8, owners=1)
    found = run(trace, scenario(2000, costs=model, answers="recorded"))
    assert found.first_token_seconds[0] > 2
    assert found.makespan_seconds == pytest.approx(sum(found.first_token_seconds) + 1, rel=0.5)


def test_answer_times_that_were_not_recorded_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("arrival_seconds,prompt_tokens,output_tokens\n0,64,1\n")
    with pytest.raises(ConfigError, match="--answers recorded"):
        run(read_trace(path), scenario(10, answers="recorded"))


def test_the_same_run_gives_the_same_figures(write: WriteTrace) -> None:
    trace = random_trace(write, seed=5)
    first, second = (run(trace, scenario(300, 4), users=4).as_plain() for _ in range(2))
    for figures in (first, second):
        del figures["cpu_seconds"]
    assert first == second
    other = run(trace, scenario(300, 4), users=4, seed=1).as_plain()
    assert other["first_token_seconds"] != first["first_token_seconds"]


def test_requests_with_a_chunk_or_less_to_compute_are_timed_apart(write: WriteTrace) -> None:
    """A long prompt comes first, so the short ones behind it wait for its chunks."""
    trace = write([[(100, 1)], [(3, 1)], [(4, 1)]])
    found = run(trace, scenario(200, chunk_tokens=4 * PAGE), users=3, seed=0)
    assert len(found.first_token_seconds) == 3
    assert len(found.short_first_token_seconds) == 2
    alone = costs(1).batch([Span(0, 4 * PAGE)], 0).total
    assert max(found.short_first_token_seconds) > alone
    assert found.as_plain()["short_requests"] == 2


# Owners, groups, decode --------------------------------------------------------------------------


def test_balance_is_measured_against_what_is_possible(write: WriteTrace) -> None:
    found = run(write([[(9, 1)], [(16, 1)]]), scenario(80, owners=8), users=2)
    assert sorted(found.busiest_owner) == pytest.approx([1.0, 2 / (9 / 8)])
    assert list(found.least_busiest_owner) == list(found.busiest_owner)


@pytest.mark.parametrize("policy", ["longest_prefix", "least_loaded", "round_robin"])
def test_the_router_sends_prompts_where_their_prefix_is_or_not(
    write: WriteTrace, policy: Any
) -> None:
    turns = [(10 + n, 5) for n in range(20)]
    trace = write([turns] * 2)
    found = run(trace, scenario(200, groups=3, router_policy=policy), users=2)
    asked = sum(pages for pages, _ in turns)
    at_best = 1 - (turns[-1][0]) / asked
    if policy == "longest_prefix":
        assert found.hit_rate == pytest.approx(at_best, abs=1e-6)
    else:
        assert found.hit_rate < at_best - 0.05


def test_three_groups_compute_three_prompts_at_once(write: WriteTrace) -> None:
    trace = write([[(100, 1)]] * 3)
    one = run(trace, scenario(1000), users=3)
    three = run(trace, scenario(1000, groups=3, router_policy="round_robin"), users=3)
    assert max(three.first_token_seconds) < max(one.first_token_seconds) / 2


def test_descriptors_are_counted_both_ways_for_what_decode_lacks(write: WriteTrace) -> None:
    trace = write([[(64, 1), (80, 1)]])
    found = run(trace, scenario(800, owners=8, decode_tokens=800 * PAGE))
    assert list(found.sent_pages) == [64, 16]
    # In fresh pools striping makes one run of each owner's pages; without, none merges.
    assert list(found.plain_descriptors) == [64, 16]
    assert list(found.striped_descriptors) == [8, 8]


def test_a_replicated_group_sends_one_run(write: WriteTrace) -> None:
    found = run(write([[(64, 1)]]), scenario(800, decode_tokens=800 * PAGE))
    assert list(found.plain_descriptors) == list(found.striped_descriptors) == [1]


def test_a_prompt_waits_for_room_at_decode(write: WriteTrace) -> None:
    chosen = scenario(100, decode_tokens=11 * PAGE, decode_seconds_per_token=1.0)
    found = run(write([[(10, 64)]] * 2), chosen, users=2)
    waited = sorted(found.queue_seconds)
    assert waited[0] == 0.0
    assert waited[1] == pytest.approx(64 + min(found.first_token_seconds))


def random_trace(write: WriteTrace, seed: int) -> Trace:
    random = np.random.default_rng(seed)
    conversations: list[Conversation] = []
    for _ in range(12):
        lengths = np.cumsum(random.integers(1, 12, 8))
        conversations.append([(int(pages), int(random.integers(1, 300))) for pages in lengths])
    return write(conversations)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("owners", [1, 4])
def test_every_request_ends_and_all_books_balance(
    write: WriteTrace, seed: int, owners: int
) -> None:
    trace = random_trace(write, seed)
    chosen = scenario(
        120, owners, groups=2, decode_tokens=100 * PAGE, chunk_tokens=3 * PAGE, answers="recorded"
    )
    found = run(trace, chosen, users=5)  # checks the invariants of all parts at its end
    assert found.requests == trace.requests
    assert found.served_tokens > found.cached_tokens > 0
    assert len(found.first_token_seconds) + sum(found.refused.values()) == trace.requests
    assert all(
        0 <= queued <= first
        for queued, first in zip(found.queue_seconds, found.first_token_seconds, strict=True)
    )


def test_an_open_loop_does_not_wait_for_answers(write: WriteTrace) -> None:
    trace = write([[(10, 10_000)]] * 5)
    loop = OpenLoop(trace, 5, conversation_every_seconds=1.0)
    found = Simulation(scenario(100, decode_seconds_per_token=1.0), trace, loop).run()
    assert found.requests == 5
    assert max(found.first_token_seconds) < 1


# Sweeps ------------------------------------------------------------------------------------------


def sweep(trace: Trace, **changes: Any) -> Sweep:
    values: dict[str, Any] = {
        "model": MODEL,
        "weights": WEIGHTS,
        "sizes": SIZES,
        "rates": RATES,
        "cp_size": 8,
        "physical_tokens": 20 * PAGE,
        "context_length": 1 << 20,
        "multipliers": (1, 8),
        "users": (1, 3),
        "requests": trace.requests,
    }
    return Sweep(**(values | changes))


def test_a_sweep_runs_every_case_and_tells_how_far_it_is(write: WriteTrace) -> None:
    trace = random_trace(write, seed=0)
    told: list[tuple[Case, int]] = []
    found = list(run_sweep(sweep(trace), trace, lambda case, done: told.append((case, done))))
    cases = [Case(1, 1), Case(8, 1), Case(1, 3), Case(8, 3)]
    assert [result.case for result in found] == cases
    assert [result.logical_tokens for result in found] == [1280, 10_240, 1280, 10_240]
    for case in cases:
        assert [done for of, done in told if of == case] == list(range(1, trace.requests + 1))
    assert found[1].outcome.hit_rate > found[0].outcome.hit_rate


def test_every_multiplier_is_asked_the_same(write: WriteTrace) -> None:
    trace = random_trace(write, seed=0)
    found = list(run_sweep(sweep(trace, users=None, conversation_every_seconds=1.0), trace, _quiet))
    assert [str(result.case) for result in found] == ["1x, recorded times", "8x, recorded times"]
    assert found[0].outcome.prompt_tokens == found[1].outcome.prompt_tokens


def _quiet(_case: Case, _done: int) -> None:
    pass


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"multipliers": (9,)}, "--pool-multipliers"),
        ({"multipliers": (0,)}, "--pool-multipliers"),
        ({"requests": 0}, "--requests"),
        ({"seed": -1}, "--seed"),
        ({"decode_tokens": 64}, "--decode-max-total-tokens has no effect"),
        ({"speed": 2.0}, "--speed has no effect"),
        ({"groups": 0}, "--prefill-groups"),
        ({"chunk_tokens": 0}, "--chunked-prefill-size"),
        ({"decode_seconds_per_token": -1.0}, "--decode-ms-per-token"),
        ({"users": (4, 0)}, "--users"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_it_runs(
    write: WriteTrace, changes: dict[str, Any], named: str
) -> None:
    trace = write([[(5, 5)]])
    with pytest.raises(ConfigError, match=named):
        next(run_sweep(sweep(trace, **changes), trace, _quiet))


def test_a_pool_without_a_page_is_refused(write: WriteTrace) -> None:
    trace = write([[(5, 5)]])
    with pytest.raises(CapacityError, match="no stripe of pages"):
        next(run_sweep(sweep(trace, physical_tokens=10), trace, _quiet))
