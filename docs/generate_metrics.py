"""Writes docs/metrics.md, the page of all metrics, from the catalogue in telemetry.py.

Runs that one file, which imports nothing, so it needs nothing installed. `--check` writes nothing,
and exits with 1 where the page is not what would be written.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/metrics.md"
CATALOGUE = ROOT / "src/cp_shared_kv/telemetry.py"

INTRODUCTION = """\
# Metrics

Written by `docs/generate_metrics.py` from `src/cp_shared_kv/telemetry.py`: edit that, then run it.

`cpkv serve --enable-metrics` serves these at /metrics in Prometheus' text format, without a key.
The server asks its processes at each scrape; a family is left out while those that know it do not
answer. [A Grafana dashboard, and Prometheus with it](../deploy/README.md), are ready to start. The
server's page at / shows most of this live, without either.

Tokens and pages are logical, those of whole groups, unless a name says `physical` or a label names
the rank. What ends in `_total` only grows, also when a process is started again, until the server
itself is.
"""

MAPPING = """\
## The same in SGLang and vLLM

Names are those that Prometheus sees. "Same" is a metric of SGLang under its own name, so that its
dashboards and scripts find it; where SGLang counts the KV of one rank, these count the group's, and
it has no series by owner. The last column says what of vLLM's V1 engine comes nearest. Its
`vllm:kv_cache_usage_perc` leaves out cached blocks that nobody uses, as `sglang:token_usage` does.
"""

ABSENT = """\
Not served, for there is nothing to count: preempted or retracted requests
(`vllm:num_preemptions_total`, `sglang:num_retracted_reqs`), since an admitted request holds all of
its pages. Times and rates of single transfers (`sglang:kv_transfer_latency_ms`,
`sglang:kv_transfer_speed_gb_s`, `vllm:nixl_xfer_time_seconds`) are not measured; pages, bytes and
descriptors are.
"""


def page() -> str:
    """The text of the page."""
    told = runpy.run_path(str(CATALOGUE), run_name="telemetry")
    parts = [INTRODUCTION]
    for title, metrics in told["SECTIONS"].items():
        parts += [f"## {title}\n", table(meanings(metrics))]
    parts += ["## Labels\n", table(labels(told["LABELS"])), MAPPING]
    parts += [table(mapping(told["CATALOGUE"])), ABSENT]
    return "\n".join(parts)


def meanings(metrics: Sequence[Any]) -> Iterator[Sequence[str]]:
    yield "metric", "kind", "unit", "own labels", "meaning"
    for metric in metrics:
        own = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"`{metric.name}`", metric.kind, metric.unit, own, quoted(metric.help)


def labels(texts: dict[str, str]) -> Iterator[Sequence[str]]:
    yield "label", "value"
    for label, text in texts.items():
        yield f"`{label}`", text


def mapping(metrics: Sequence[Any]) -> Iterator[Sequence[str]]:
    yield "here", "SGLang", "vLLM, nearest"
    for metric in metrics:
        sglang = "same" if metric.sglang == metric.name else quoted(metric.sglang)
        yield f"`{metric.name}`", sglang, quoted(metric.nearest_vllm)


def quoted(text: str) -> str:
    """Names of metrics as code."""
    return re.sub(r"\b(?:sglang|cpkv|vllm):\w+", lambda name: f"`{name[0]}`", text)


def table(rows: Iterator[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(
        f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|\n" for line in lines
    )


def main(arguments: Sequence[str]) -> int:
    wanted = page()
    if "--check" not in arguments:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == wanted:
        return 0
    print("stale: docs/metrics.md; to mend it: python docs/generate_metrics.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
