"""`cpkv simulate`: a recorded workload through the engine's own scheduler, without a model."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cp_shared_kv.cli.whole_numbers import WholeNumbers
from cp_shared_kv.engine.config_values import KVCacheDtype, RouterPolicy
from cp_shared_kv.errors import CapacityError
from cp_shared_kv.planner.capacity import PlanRequest, make_plan, pool_sizes
from cp_shared_kv.planner.gpus import gpu_named
from cp_shared_kv.planner.model_catalogue import model_named
from cp_shared_kv.planner.plot import check_plots_place, draw_plots
from cp_shared_kv.planner.ranges import check_at_least
from cp_shared_kv.planner.rates import Rates
from cp_shared_kv.planner.report import (
    Row,
    all_results,
    assumptions,
    check_results_place,
    print_results,
    write_results,
)
from cp_shared_kv.planner.simulate import AnswerTimes
from cp_shared_kv.planner.sweep import (
    LONGEST_THINK_SECONDS,
    Case,
    Sweep,
    SweepProgress,
    run_sweep,
)
from cp_shared_kv.planner.trace_files import read_trace
from cp_shared_kv.planner.weight_bytes import WeightSplit, weight_bytes

MOST_REQUESTS = 20_000
"""Of a closed loop, where --requests does not say otherwise."""


def simulate(
    trace: Path,
    /,
    *,
    users: WholeNumbers | None = None,
    pool_multipliers: WholeNumbers = (1, 2, 4, 8),
    requests: int | None = None,
    model: str = "glm-5.2",
    gpu: str = "h200",
    attention_context_parallel_size: Annotated[
        int, Parameter(name=["--attention-context-parallel-size", "--cp-size"])
    ] = 8,
    max_total_tokens: int | None = None,
    kv_cache_dtype: KVCacheDtype = "bf16",
    page_size: int = 64,
    context_length: int | None = None,
    chunked_prefill_size: int = 8192,
    prefill_groups: int = 1,
    router_policy: RouterPolicy = "longest_prefix",
    answers: AnswerTimes = "modelled",
    decode_ms_per_token: float = 20.0,
    longest_think: float = LONGEST_THINK_SECONDS,
    ramp: float = 0.0,
    speed: float = 1.0,
    conversation_every: float | None = None,
    descriptors: bool = False,
    decode_max_total_tokens: int | None = None,
    gpu_results: Path | None = None,
    seed: int = 0,
    results: Path | None = None,
    plots: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Replay a trace through the engine's scheduler, pool and router, on a model of its costs.

    Only the forward pass is replaced, by stated formulas over the GPU's rates. Hit rate, refused
    prompts, queueing, time to first token, balance of owners and evictions come out, for every pool
    multiplier (1: a replicated group; N: a shared one) and number of users. Traces: agentic
    conversations and Mooncake's (JSON lines), or a CSV with arrival_seconds, prompt_tokens and
    output_tokens.

    Sixteen users who wait for their answers and think as long as was recorded:

    ```
    cpkv simulate agentic.jsonl --users 16
    ```

    More of them, with pictures and a file of all figures; requests at their recorded times; and
    many groups behind a router:

    ```
    cpkv simulate agentic.jsonl --users 8,16,32,64 --plots plots --results sweep.json
    cpkv simulate mooncake.jsonl --speed 2
    cpkv simulate agentic.jsonl --users 1000 --prefill-groups 64 --pool-multipliers 8
    ```

    Parameters
    ----------
    trace
        The file. Its format is told by its first line.
    users
        Users of a closed loop, some numbers with commas between; without it, requests come at
        recorded times.
    pool_multipliers
        How many ranks share pages, some numbers with commas between.
    requests
        Stop asking after so many; by default 20000 of a closed loop, all of an open one. Requests
        of Mooncake's and CSV files are by default replayed once at most, for a second pass would
        find what the first left.
    model
        Whose shapes the costs have: deepseek-v3.2, glm-5, glm-5.2, or a config.json.
    gpu
        Whose rates: h20 (the H20 of 96 GB), h20-3e (that of 141 GB), h100, h200, h800 or b200.
    attention_context_parallel_size
        Ranks that compute, N.
    max_total_tokens
        Physical KV tokens of a rank; by default what `cpkv plan` says for this model and GPU.
    kv_cache_dtype
        What KV pages store.
    page_size
        Tokens of a KV page; a divisor or a multiple of the trace's blocks.
    context_length
        Longest prompt plus output in tokens; the model's own limit by default.
    chunked_prefill_size
        New tokens of one prefill batch.
    prefill_groups
        Groups behind the router, each with a pool of its own.
    router_policy
        How the router chooses: longest_prefix, least_loaded or round_robin.
    answers
        When an answer ends: modelled, by --decode-ms-per-token; recorded, as in the trace.
    decode_ms_per_token
        Milliseconds of decode for each output token.
    longest_think
        Seconds after which a user of a closed loop goes on, however long the recorded one took.
    ramp
        Seconds over which users of a closed loop begin; at once by default.
    speed
        Divides the recorded times of an open loop.
    conversation_every
        Mean seconds between conversations, for an open loop of a trace that has no such times.
    descriptors
        Simulate decode's pool as well and count the descriptors of transfers, with plain and with
        striped destinations.
    decode_max_total_tokens
        KV tokens of that pool; by default as many as the group's.
    gpu_results
        A results file of `python -m benchmarks.gpu`: what it has measured replaces assumed rates.
    seed
        Of the order in which conversations are dealt.
    results
        File for all figures as JSON, with commit, versions and settings.
    plots
        Directory for pictures of hit rate, time to first token, balance (needs the extra `plots`).
    as_json
        Write the same JSON to stdout instead of tables.
    """
    check_at_least("--attention-context-parallel-size", attention_context_parallel_size, 1)
    recorded = read_trace(trace)
    config = model_named(model)
    weights = weight_bytes(config)
    kind = gpu_named(gpu)
    rates = Rates.of_gpu(kind)
    if gpu_results is not None:
        rates = rates.with_results(gpu_results)
    plan = PlanRequest(
        model=config,
        weights=weights,
        split=WeightSplit(attention_context_parallel_size),
        cp_size=attention_context_parallel_size,
        memory_bytes=kind.memory_bytes,
        kv_cache_dtype=kv_cache_dtype,
        page_size=page_size,
        context_length=context_length,
        chunk_tokens=chunked_prefill_size,
    )
    replace(  # refuses what the engine would refuse
        plan.engine_config(shared=True),
        max_total_tokens=max_total_tokens,
        decode_max_total_tokens=decode_max_total_tokens,
    )
    if requests is None:
        requests = recorded.requests
        if users is not None:
            requests = MOST_REQUESTS if recorded.local_blocks else min(requests, MOST_REQUESTS)
    if max_total_tokens is None:
        max_total_tokens = _planned_tokens(plan)
    sweep = Sweep(
        model=config,
        weights=weights,
        sizes=pool_sizes(config, kv_cache_dtype, page_size),
        rates=rates,
        cp_size=attention_context_parallel_size,
        physical_tokens=max_total_tokens,
        context_length=plan.longest_request_tokens,
        multipliers=tuple(pool_multipliers),
        users=None if users is None else tuple(users),
        requests=requests,
        chunk_tokens=chunked_prefill_size,
        groups=prefill_groups,
        router_policy=router_policy,
        answers=answers,
        decode_seconds_per_token=decode_ms_per_token / 1000,
        descriptors=descriptors,
        decode_tokens=decode_max_total_tokens,
        longest_think_seconds=longest_think,
        ramp_seconds=ramp,
        speed=speed,
        conversation_every_seconds=conversation_every,
        seed=seed,
    )
    # A sweep may take hours: what becomes of it is known before.
    if results is not None:
        sources = [trace, Path(model), *([] if gpu_results is None else [gpu_results])]
        check_results_place(results, sources)
    if plots is not None:
        check_plots_place(plots)
    with _bar(sweep.cases(), sweep.requests) as show:
        rows: list[Row] = [found.as_plain() for found in run_sweep(sweep, recorded, show)]
    content = all_results(sweep, recorded, rows)
    if as_json:
        print(json.dumps(content, indent=1))
    else:
        said = assumptions(sweep, recorded, model, kind.name)
        print_results(rows, said, Console(highlight=False))
    if results is not None:
        write_results(content, results)
    if plots is not None:
        tokens = f"{sweep.physical_tokens:,} tokens a rank"
        _say(draw_plots(rows, plots, f"{recorded.name}: {sweep.requests:,} requests, {tokens}"))
    return 0


def _planned_tokens(plan: PlanRequest) -> int:
    """Physical tokens of a rank. CapacityError, with the flags of this command, where none fit."""
    try:
        return make_plan(plan).arrangements[-1].physical_tokens
    except CapacityError as error:
        raise CapacityError(
            error.what,
            value=error.value,
            allowed=error.allowed,
            change="give --max-total-tokens, another --gpu or another --cp-size",
        ) from error


def _say(files: Iterable[Path]) -> None:
    for file in files:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"drew {file}", markup=False)


@contextmanager
def _bar(cases: list[Case], requests: int) -> Generator[SweepProgress]:
    """A bar over all cases, with the time that is left as it looks."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    place = {case: number for number, case in enumerate(cases)}
    with bar:
        task = bar.add_task("", total=len(cases) * requests)

        def show(case: Case, done: int) -> None:
            if done % 64 == 0:
                completed = place[case] * requests + done
                bar.update(task, description=str(case), completed=completed)

        yield show
