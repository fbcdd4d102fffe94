"""Writes docs/planning/results.md, its pictures, and what `cpkv plan` answers in docs/planning.md.

Tables and pictures come from benchmarks/results/simulate-*.json and the newest plain_hit_rate and
simulated_hit_rate there, plans from the code. Needs the extras `engine` and `plots`. `--check`
writes nothing, and exits with 1 where a file is not what would be written; pictures are compared
where matplotlib is the release that drew them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import matplotlib as mpl

from cp_shared_kv.cli.app import run
from cp_shared_kv.planner.plot import draw_plots

ROOT = Path(__file__).resolve().parents[1]
GUIDE = Path("docs/planning.md")
PAGE = Path("docs/planning/results.md")
RESULTS = Path("benchmarks/results")
COMMON = "cpkv simulate agentic.jsonl --max-total-tokens 237312 --answers recorded"
GROUPS = "--users 1000 --prefill-groups 64 --pool-multipliers 8 --router-policy"
SWEEP = {f"users-{users}": f"--users {users}" for users in (8, 16, 32, 64)}
DESCRIPTORS = {"descriptors-16": "--users 16 --descriptors"}
CROWDED = {
    "users-64-ramp": "--users 64 --pool-multipliers 8 --ramp 7200",
    "users-64-groups-4": "--users 64 --pool-multipliers 8 --prefill-groups 4",
}
ROUTED = {
    "groups-longest-prefix": f"{GROUPS} longest_prefix",
    "groups-least-loaded": f"{GROUPS} least_loaded",
    "groups-round-robin": f"{GROUPS} round_robin",
}
NO_QUEUE = {"no-queue": "--users 32,64 --gpu-results benchmarks/rates_of_no_queue.json"}
RUNS = SWEEP | NO_QUEUE | CROWDED | ROUTED | DESCRIPTORS
MULTIPLIERS = (1, 2, 4, 8)
CONSOLE = re.compile(r"^```console\n\$ (cpkv .*)\n(?s:.*?)^```$", re.M)
COLUMNS = 88
TITLE = "20,000 agentic requests, 237,312 tokens a rank, 8 x H200"
Row = dict[str, Any]

TEXT = """\
# What the replays found

Written by `docs/generate_planning.py` from the files below, which the commands beside them made.
[Capacity planning](../planning.md) says what it means.

20,000 requests of recorded agentic coding sessions (mean prompt {mean_prompt:,} tokens), in a
closed loop: each user waits for the answer, which takes as long as was recorded, and thinks as
long as was recorded, half an hour at most. GLM-5.2 on eight H200, 237,312 tokens of KV a rank, so
pools of 237,312 tokens (1x, what a replicated group has) to 1,898,496 (8x, shared by eight).
Times to first token are those of the cost model.

## Runs

All begin with `{common}` and end with `--results` and the file.

{runs}

CPU seconds are those of a case in one thread: the least and the most of a run. The goal of 60 s
for 20,000 requests is {time_verdict}. The load says how many processes wanted a core when the run
ended. Five seeds of 16 users once more, by `python -m benchmarks simulated_hit_rate`,
[as recorded](../../{replays_file}):

{replays}

## Hit rate and time to first token

![hit rate over the pool, by users](hit-rate.svg)

![time to first token over the pool, by users](first-token.svg)

Seconds. *Short* are the requests that need one chunk (8,192 tokens) or less, as the cache has the
rest. *Busy* is the part of the time in which the group computes.

{sweep}

## Against an independent estimate

A plain LRU over whole conversations, by others, with an order of requests of its own: percent of
the pages of all prompts, those refused among them. *Ours* is a second plain LRU, in [its
file](../../{plain_file}), over the orders that the replays have, with five seeds for 16 users and
one for the others. *Without queues* is a replay at [rates](../../benchmarks/rates_of_no_queue.json)
so high that nobody waits for the group.

{estimate}

With thinking cut at 60 s instead of half an hour, the plain LRU's figures for 16 users are
{short_think}.

## Owner balance

![pages of the busiest owner over an even share](owner-balance.svg)

Pages of a request's busiest owner over an even share, 16 users, 8 owners, pool kept full by
eviction. A prompt whose pages are no multiple of 8 cannot reach 1; *possible* is the best that it
could have.

{balance}

## Descriptors of a transfer

![descriptors of a transfer, plain and striped](descriptors.svg)

For one layer and one kind of page, all ranks together; only pages that decode lacks are sent.
*Plain*: a page goes to whatever page decode draws for its position. *Striped*: each owner's pages
lie together there. Decode's pool is simulated here, as large as the group's, and at 1x and 2x
prompts wait for it too: hit rates and times are those of the runs above only from 4x up.

{descriptors}

## 64 users, spread otherwise

The last row of 64 users above beside two other ways: users who begin over two hours instead of all
at once, and four groups instead of one.

{crowded}

## 64 groups, 1,000 users

Pools of 8x.

{routed}
"""


def load(root: Path, name: str) -> dict[str, Any]:
    """One run's file."""
    return json.loads((root / RESULTS / f"simulate-{name}.json").read_text(encoding="utf-8"))


def newest(root: Path, benchmark: str) -> tuple[Path, dict[str, Any]]:
    """The last record of a benchmark: where it is below the root, and what it says."""
    path = max((root / RESULTS).glob(f"{benchmark}-*.json"))
    return path.relative_to(root), json.loads(path.read_text(encoding="utf-8"))


def cases(root: Path, names: Iterable[str]) -> list[Row]:
    """The cases of some runs, one after the other."""
    return [row for name in names for row in load(root, name)["cases"]]


def page(root: Path) -> str:
    """The text of results.md."""
    plain_path, plain = newest(root, "plain_hit_rate")
    rows = cases(root, SWEEP)
    (kept_full,) = (row for row in rows if (row["users"], row["multiplier"]) == (16, 8))
    slowest = max(row["cpu_seconds"] for row in rows)
    counting = max(row["cpu_seconds"] for row in cases(root, DESCRIPTORS))
    think = (f"{low} to {high} ({times}x)" for times, low, high in short_thinking(plain))
    replays_path, replays = newest(root, "simulated_hit_rate")
    return TEXT.format(
        mean_prompt=round(kept_full["prompt_tokens"] / kept_full["requests"]),
        common=COMMON,
        runs=table("file; command goes on with; CPU s; memory, MiB; load", runs(root)),
        time_verdict=f"{'met' if slowest <= 60 else '**missed**'}: {slowest:.0f} s at most, and "
        f"{counting:.0f} s where descriptors are counted too",
        sweep=table(
            "users; pool; hit rate; refused; p50; p90; p99; short; short p50; short p99; busy",
            map(sweep_cells, rows),
        ),
        replays_file=replays_path,
        replays=table("pool; hit rate, %; CPU s, median; CPU s, all", seeds(replays)),
        plain_file=plain_path,
        estimate=table(
            "users; pool; estimate; ours; replay; replay - estimate; replay without queues",
            estimates(rows, plain, cases(root, NO_QUEUE)),
        ),
        short_think=", ".join(think),
        balance=table("; replay; possible; goal", balance(kept_full)),
        descriptors=table(
            "users; pool; transfers; pages p50; plain p50; striped p50; plain p99; striped p99; "
            "fewer, in all",
            map(descriptor_cells, cases(root, DESCRIPTORS)),
        ),
        crowded=table(
            "command goes on with; hit rate; computed, M tokens; p50, s; p99, s; groups busy",
            crowded(root),
        ),
        routed=table(
            "router; hit rate; computed, M tokens; p50, s; p99, s; short p99, s; groups busy",
            (
                [f"`{run_of['settings']['router_policy']}`", *group_cells(run_of["cases"][0])]
                for run_of in (load(root, name) for name in ROUTED)
            ),
        ),
    )


def runs(root: Path) -> Iterator[list[str]]:
    """A line for each file."""
    for name, arguments in RUNS.items():
        content = load(root, name)
        seconds = [row["cpu_seconds"] for row in content["cases"]]
        least, most = f"{min(seconds):.0f}", f"{max(seconds):.0f}"
        yield [
            f"[{name}](../../{RESULTS}/simulate-{name}.json)",
            f"`{arguments}`",
            most if least == most else f"{least} to {most}",
            str(max(row["peak_memory_mib"] for row in content["cases"])),
            f"{content['machine']['load_average_1min']:.0f}",
        ]


def seeds(replays: dict[str, Any]) -> Iterator[list[str]]:
    """What the same replays give and take under each seed."""
    for multiplier in MULTIPLIERS:
        rates = [
            100 * found["hit_rates"][str(multiplier)] for found in replays["figures"]["hit_rates"]
        ]
        took = replays["summary_seconds"][f"replay, {multiplier}x"]
        yield [
            f"{multiplier}x",
            f"{min(rates):.1f} to {max(rates):.1f}",
            f"{took['median']:.0f}",
            f"{took['min']:.0f} to {took['max']:.0f}",
        ]


def sweep_cells(row: Row) -> list[str]:
    first, short = row["first_token_seconds"], row["short_first_token_seconds"]
    return [
        str(row["users"]),
        f"{row['multiplier']}x",
        f"{row['hit_rate']:.1%}",
        f"{row['refused_requests']:,}",
        *(f"{first[q]:,.2f}" for q in ("p50", "p90", "p99")),
        f"{row['short_requests']:,}",
        *(seconds(short, q) for q in ("p50", "p99")),
        f"{row['prefill_busy']:.0%}",
    ]


def estimates(
    rows: Sequence[Row], plain: dict[str, Any], no_queue: Sequence[Row]
) -> Iterator[list[str]]:
    """Estimate, plain LRU and replay side by side, in percent."""
    at_once = {(row["users"], row["multiplier"]): row["hit_rate"] for row in no_queue}
    for row in rows:
        users, multiplier = str(row["users"]), str(row["multiplier"])
        given = 100 * plain["config"]["estimate"][users][multiplier]
        ours = [
            100 * found["hit_rates"][multiplier]
            for found in plain["figures"]["runs"]
            if str(found["users"]) == users and found["longest_think_seconds"] == 1800
        ]
        replay = 100 * row["hit_rate"]
        unqueued = at_once.get((row["users"], row["multiplier"]))
        yield [
            users,
            f"{multiplier}x",
            f"{given:.1f}",
            f"{min(ours):.1f} to {max(ours):.1f}" if len(ours) > 1 else f"{ours[0]:.1f}",
            f"{replay:.1f}",
            f"{replay - given:+.1f}",
            f"{100 * unqueued:.1f}" if unqueued is not None else "",
        ]


def short_thinking(plain: dict[str, Any]) -> Iterator[tuple[int, str, str]]:
    for multiplier in MULTIPLIERS:
        rates = [
            100 * found["hit_rates"][str(multiplier)]
            for found in plain["figures"]["runs"]
            if found["longest_think_seconds"] == 60
        ]
        yield multiplier, f"{min(rates):.1f}", f"{max(rates):.1f}"


def balance(row: Row) -> Iterator[list[str]]:
    """Quantiles of the busiest owner's share beside the best possible and the goal."""
    found, possible = row["busiest_owner_over_ideal"], row["least_possible_busiest_owner"]
    for quantile, goal in (("p50", "1.01"), ("p99", "1.03"), ("max", "")):
        yield [quantile, f"{found[quantile]:.4f}", f"{possible[quantile]:.4f}", goal]


def descriptor_cells(row: Row) -> list[str]:
    found = row["descriptors"]
    shown = [("pages", "p50"), *((way, q) for q in ("p50", "p99") for way in ("plain", "striped"))]
    return [
        str(row["users"]),
        f"{row['multiplier']}x",
        f"{found['transfers']:,}",
        *(f"{found[what][quantile]:,.0f}" for what, quantile in shown),
        f"{found['plain_total'] / found['striped_total']:.1f}x",
    ]


def crowded(root: Path) -> Iterator[list[str]]:
    """64 users of a pool of 8x: all at once before one group, and otherwise."""
    (at_once,) = (row for row in load(root, "users-64")["cases"] if row["multiplier"] == 8)
    found = {SWEEP["users-64"]: at_once}
    found |= {arguments: load(root, name)["cases"][0] for name, arguments in CROWDED.items()}
    for arguments, row in found.items():
        rate, computed, p50, p99, _, busy = group_cells(row)
        yield [f"`{arguments}`", rate, computed, p50, p99, busy]


def group_cells(row: Row) -> list[str]:
    first, short = row["first_token_seconds"], row["short_first_token_seconds"]
    return [
        f"{row['hit_rate']:.1%}",
        f"{row['computed_tokens'] / 1e6:,.0f}",
        f"{first['p50']:,.2f}",
        f"{first['p99']:,.2f}",
        seconds(short, "p99"),
        f"{row['prefill_busy']:.0%}",
    ]


def seconds(quantiles: dict[str, float] | None, name: str) -> str:
    """Empty where there was no such request."""
    return "" if quantiles is None else f"{quantiles[name]:,.2f}"


def table(heading: str, rows: Iterable[Sequence[str]]) -> str:
    """A table; the heading's cells have semicolons between them."""
    names = heading.split("; ")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(root: Path, directory: Path) -> list[Path]:
    """All pictures, into a directory; returns the files."""
    drawn: dict[str, Path] = {}
    # Of the runs that count descriptors only that picture stays: the sweep's replace the others.
    for names in (DESCRIPTORS, SWEEP):
        drawn |= {path.name: path for path in draw_plots(cases(root, names), directory, TITLE)}
    return list(drawn.values())


def answer(command: str) -> str:
    """What a command prints, as docs/planning.md shows it."""
    shown = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=str(COLUMNS)),
        mock.patch.object(sys, "argv", shlex.split(command)),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
    ):
        run()
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    return "\n".join(line for line in lines if line)


def guide(text: str) -> str:
    """docs/planning.md with the answers of its commands as they are now."""
    return CONSOLE.sub(lambda found: f"```console\n$ {found[1]}\n{answer(found[1])}\n```", text)


def same_matplotlib(picture: str) -> bool:
    return f"Matplotlib v{mpl.__version__}," in picture


def main(arguments: Sequence[str]) -> int:
    texts: dict[Path, Callable[[], str]] = {
        PAGE: lambda: page(ROOT),
        GUIDE: lambda: guide((ROOT / GUIDE).read_text(encoding="utf-8")),
    }
    if "--check" not in arguments:
        draw(ROOT, ROOT / PAGE.parent)
        for path, wanted in texts.items():
            (ROOT / path).write_text(wanted(), encoding="utf-8")
        return 0
    stale = [path for path, wanted in texts.items() if (ROOT / path).read_text() != wanted()]
    with TemporaryDirectory() as directory:
        for fresh in draw(ROOT, Path(directory)):
            path = PAGE.parent / fresh.name
            kept = (ROOT / path).read_text(encoding="utf-8")
            if same_matplotlib(kept) and kept != fresh.read_text(encoding="utf-8"):
                stale.append(path)
    for path in stale:
        print(f"{path} is stale; to mend it: python docs/generate_planning.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
