"""A plan as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cp_shared_kv.planner.capacity import ArrangementPlan, Plan
from cp_shared_kv.planner.gpus import GIB
from cp_shared_kv.planner.whole_cells import print_whole

BF16_BYTES = 2
Cell = Callable[[ArrangementPlan], str]


def print_plan(plan: Plan, title: str, console: Console) -> None:
    """What fits, arrangement by arrangement, and what to mind."""
    print_whole(_table(plan, title), console)
    for note in notes(plan):
        console.print(f"  {note}", markup=False)


def notes(plan: Plan) -> list[str]:
    """What the figures leave out, where it matters."""
    found: list[str] = []
    in_bf16 = BF16_BYTES * plan.parameters
    if plan.memory_bytes is not None and in_bf16 > plan.weight_bytes:
        found.append(
            "Weights are split as in SGLang's servers, with the plugin there. `cpkv serve` has "
            f"all of them on each rank, {_gib(in_bf16)} in bf16"
            + (": this model does not fit it." if in_bf16 > plan.memory_bytes else ".")
        )
    left, best = plan.activation_bytes, plan.arrangements[-1]
    scores = best.index_score_bytes
    if left is not None and scores > left:
        found.append(
            f"Indexer scores of one chunk at the longest prompt take {_gib(scores)} at once, more "
            f"than the {_gib(left)} outside of weights, pool and scratch: lower "
            "--mem-fraction-static or --chunked-prefill-size, or score in blocks."
        )
    if best.longest_prompt_tokens < plan.context_length - 1:
        found.append(
            f"The pool, not the model, limits prompts: the model takes {plan.context_length:,} "
            "tokens. A format of fewer bytes (--kv-cache-dtype fp8_e4m3) or more ranks raise it."
        )
    return found


def _table(plan: Plan, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    table.add_column("")
    for arrangement in plan.arrangements:
        table.add_column(arrangement.arrangement, justify="right")
    if plan.memory_bytes is not None and plan.usable_bytes is not None:
        _same(table, plan, "memory of a rank", _gib(plan.memory_bytes))
        _same(table, plan, "weights", _gib(plan.weight_bytes))
    _each(table, plan, "scratch, at most", lambda a: _gib(a.scratch_bytes))
    _each(table, plan, "KV pool", lambda a: _gib(a.pool_bytes))
    _each(table, plan, "KV bytes a token, on a rank", lambda a: f"{a.kv_bytes_per_token:,}")
    _each(table, plan, "physical tokens a rank", lambda a: f"{a.physical_tokens:,}")
    _each(table, plan, "logical tokens of the group", lambda a: f"{a.logical_tokens:,}")
    first = plan.arrangements[0].logical_tokens
    _each(table, plan, "against replicated", lambda a: f"{a.logical_tokens / first:.2f} x")
    _each(table, plan, "longest prompt, tokens", lambda a: f"{a.longest_prompt_tokens:,}")
    for length in plan.arrangements[0].concurrent_requests:
        _each(
            table,
            plan,
            f"prompts of {length:,} at once",
            lambda a, length=length: f"{a.concurrent_requests[length]:,}",
        )
    return table


def _each(table: Table, plan: Plan, label: str, cell: Cell) -> None:
    table.add_row(label, *(cell(arrangement) for arrangement in plan.arrangements))


def _same(table: Table, plan: Plan, label: str, text: str) -> None:
    table.add_row(label, *[text] * len(plan.arrangements))


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:,.2f} GiB"
