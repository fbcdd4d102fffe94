"""`python -m benchmarks [name ...]`: run the named benchmarks, or all of them."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import Benchmark, Measurement, registered
from benchmarks.record import RESULTS, judge, record


def main(
    arguments: list[str] | None = None, package: str = "", description: str | None = __doc__
) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks{package}", description=description)
    parser.add_argument("names", nargs="*", metavar="name", help="all of them when left out")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and stop")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON files")
    parser.add_argument("--commit", help="which commit this is, in a copy that has no .git")
    options = parser.parse_args(arguments)
    benchmarks = registered(package)
    console = Console()
    if options.list:
        for benchmark in benchmarks.values():
            console.print(f"[bold]{benchmark.name}[/]  {benchmark.summary}", highlight=False)
        return 0
    unknown = [name for name in options.names if name not in benchmarks]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(benchmarks)}")
    for name in options.names or benchmarks:
        measurement = _run(benchmarks[name], console)
        path = record(name, measurement, options.results, options.commit)
        console.print(_goals(name, measurement))
        console.print(f"samples: {path}", highlight=False, soft_wrap=True)
    return 0


def _run(benchmark: Benchmark, console: Console) -> Measurement:
    columns = (
        TextColumn("{task.fields[name]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", name=benchmark.name)
        drawn = 0.0

        def show(what: str, done: int, total: int) -> None:
            # Drawn here and not by a thread of its own, which would run beside the measurement.
            nonlocal drawn
            bar.update(task, description=what, completed=done, total=total)
            if done == total or time.monotonic() - drawn > 0.2:
                bar.refresh()
                drawn = time.monotonic()

        return benchmark.run(show)


def _goals(name: str, measurement: Measurement) -> Table:
    table = Table(title=name, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("what", "against", "figure", "min", "max", "goal", ""):
        table.add_column(heading, justify="left" if heading in ("what", "against") else "right")
    for goal in measurement.goals:
        found = judge(goal, measurement.samples_seconds)
        unit = "x" if goal.against else "s"
        figures = [f"{found[key]:.2f} {unit}" for key in ("figure", "min", "max")]
        verdict = "met" if found["met"] else "[bold red]missed[/]"
        table.add_row(
            goal.sample, goal.against or "", *figures, f"<= {goal.at_most:g} {unit}", verdict
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
