"""Writes the Grafana dashboard; names, units and meanings are those of the metric catalogue.

Runs src/cp_shared_kv/telemetry.py, which imports nothing, so it needs nothing installed. `--check`
writes nothing, and exits with 1 where the file is not what would be written.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "deploy/grafana/dashboards/cp-shared-kv.json"
TOLD = runpy.run_path(str(ROOT / "src/cp_shared_kv/telemetry.py"), run_name="telemetry")
SOURCE = {"type": "prometheus", "uid": "${source}"}
FILTER = '{model_name=~"$model"}'
WINDOW = "[$__rate_interval]"
RANK = ("dp_rank", "cp_rank")
RANK_LEGEND = "group {{dp_rank}} rank {{cp_rank}}"
# Grafana's names of the catalogue's units, as they are and by the second.
UNITS = {"bytes": "bytes", "seconds": "s", "ratio": "percentunit", "GiB": "gbytes"}
RATES = {"bytes": "binBps", "requests": "reqps"}


@dataclass(frozen=True)
class Query:
    """One PromQL expression, its legend, and the metrics that it is made of."""

    expression: str
    legend: str
    metrics: tuple[Any, ...]
    unit: str


@dataclass(frozen=True)
class Panel:
    """A time series or, where it is a `stat`, the last value; `width` in 24ths of the page."""

    title: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    highest: float | None = None


def now(name: str, legend: str, by: Sequence[str] = (), how: str = "sum") -> Query:
    """A gauge over all but the labels `by`; `how` joins the values of several models."""
    metric = TOLD[name]
    return Query(
        f"{how}{_by(by)}({metric.name}{FILTER})", legend, (metric,), UNITS.get(metric.unit, "short")
    )


def rate(name: str, legend: str, by: Sequence[str] = ()) -> Query:
    """A counter's growth by the second."""
    metric = TOLD[name]
    return Query(_rate(metric, by), legend, (metric,), RATES.get(metric.unit, "short"))


def ratio(part: str, whole: str, legend: str, by: Sequence[str] = (), unit: str = "short") -> Query:
    """One counter's growth over another's."""
    metrics = TOLD[part], TOLD[whole]
    return Query(f"{_rate(metrics[0], by)} / {_rate(metrics[1], by)}", legend, metrics, unit)


def quantiles(name: str) -> list[Query]:
    """The median of a histogram and its slow end."""
    metric = TOLD[name]
    buckets = f"sum by (le) (rate({metric.name}_bucket{FILTER}{WINDOW}))"
    return [
        Query(f"histogram_quantile({q}, {buckets})", f"p{100 * q:g}", (metric,), UNITS[metric.unit])
        for q in (0.5, 0.95, 0.99)
    ]


def _rate(metric: Any, by: Sequence[str]) -> str:
    return f"sum{_by(by)}(rate({metric.name}{FILTER}{WINDOW}))"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


PANELS: dict[str, list[Panel]] = {
    "Now": [
        Panel("Engine", [now("ENGINE_UP", "up", how="min")], "stat", 4),
        Panel("Logical capacity", [now("MAX_TOTAL_NUM_TOKENS", "tokens")], "stat", 4),
        Panel("Longest prompt", [now("LONGEST_PROMPT_TOKENS", "tokens", how="min")], "stat", 4),
        Panel("Prefill pool in use", [now("TOKEN_USAGE", "in use", how="avg")], "stat", 4),
        Panel("Requests running", [now("NUM_RUNNING_REQS", "running")], "stat", 4),
        Panel("Requests queued", [now("NUM_QUEUE_REQS", "queued")], "stat", 4),
    ],
    "Prefill pools": [
        Panel(
            "Logical tokens by state",
            [
                now("NUM_USED_TOKENS", "in use"),
                now("KV_EVICTABLE_TOKENS", "cached"),
                now("KV_AVAILABLE_TOKENS", "free"),
            ],
            width=12,
            stacked=True,
        ),
        Panel(
            "Prefix cache hit rate",
            [
                ratio("CACHED_TOKENS_TOTAL", "PROMPT_TOKENS_TOTAL", "of late", (), "percentunit"),
                now("CACHE_HIT_RATE", "since the start", how="avg"),
            ],
            width=6,
            highest=1,
        ),
        Panel("Evicted tokens a second", [rate("EVICTED_TOKENS_TOTAL", "evicted")], width=6),
        Panel("Pages in use by owner", [now("OWNER_LOCKED_PAGES", RANK_LEGEND, RANK)]),
        Panel("Cached pages by owner", [now("OWNER_CACHED_PAGES", RANK_LEGEND, RANK)]),
        Panel("Free pages by owner", [now("OWNER_FREE_PAGES", RANK_LEGEND, RANK)]),
    ],
    "Requests": [
        Panel(
            "Running and queued",
            [
                now("PREFILL_REQS", "in prefill"),
                now("DECODE_REQS", "in decode"),
                now("NUM_QUEUE_REQS", "queued"),
                now("NUM_DECODE_PREALLOC_QUEUE_REQS", "queued for decode"),
            ],
        ),
        Panel("Requests over", [rate("REQUESTS_TOTAL", "{{outcome}}", ("outcome",))]),
        Panel(
            "Tokens a second",
            [
                rate("PROMPT_TOKENS_TOTAL", "prompt"),
                rate("CACHED_TOKENS_TOTAL", "prompt, cached"),
                rate("GENERATION_TOKENS_TOTAL", "output"),
            ],
        ),
        Panel("Time to first token", quantiles("TIME_TO_FIRST_TOKEN_SECONDS")),
        Panel("Between two tokens", quantiles("INTER_TOKEN_LATENCY_SECONDS")),
        Panel("Whole requests", quantiles("E2E_REQUEST_LATENCY_SECONDS")),
    ],
    "Transfer to decode, and reads": [
        Panel("Bytes sent, by rank", [rate("SENT_BYTES_TOTAL", RANK_LEGEND, RANK)]),
        Panel("Pages sent a second, by rank", [rate("SENT_PAGES_TOTAL", RANK_LEGEND, RANK)]),
        Panel(
            "Descriptors a page, by rank",
            [ratio("SENT_DESCRIPTORS_TOTAL", "SENT_PAGES_TOTAL", RANK_LEGEND, RANK)],
        ),
        Panel("Prefix bytes read, by rank", [rate("READ_BYTES_TOTAL", RANK_LEGEND, RANK)]),
        Panel(
            "Scratch, by rank",
            [
                now("SCRATCH_BYTES", RANK_LEGEND, RANK),
                now("SCRATCH_LIMIT_BYTES", "limit", how="max"),
            ],
        ),
        Panel("Failed transfers", [rate("NUM_TRANSFER_FAILED_REQS_TOTAL", "failed")]),
    ],
    "Processes": [
        Panel("Restarts", [rate("RESTARTS_TOTAL", "{{unit}}", ("unit",))]),
        Panel(
            "Tokens set aside at decode",
            [now("DECODE_USED_TOKENS", "set aside"), now("DECODE_TOKENS", "of one worker")],
        ),
        Panel("HTTP responses", [rate("HTTP_RESPONSES_TOTAL", "{{status}}", ("status",))]),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana takes it."""
    return {
        "title": "cp-shared-kv",
        "uid": "cp-shared-kv",
        "tags": ["cp-shared-kv"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model",
                    "label": "Model",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": f"label_values({TOLD['ENGINE_UP'].name}, model_name)",
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(panels()),
    }


def panels() -> Iterator[dict[str, Any]]:
    """Rows and their panels, from the left to the right and down."""
    number = top = 0
    for title, row in PANELS.items():
        number += 1
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        top, left = top + 1, 0
        for panel in row:
            number += 1
            height = 4 if panel.kind == "stat" else 8
            if left + panel.width > 24:
                top, left = top + height, 0
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            yield {"id": number, "gridPos": place} | described(panel)
            left += panel.width
        top += height


def described(panel: Panel) -> dict[str, Any]:
    """All of a panel but its place. What it shows is said in the catalogue's words."""
    units = {query.unit for query in panel.queries}
    if len(units) != 1:
        raise ValueError(f"panel {panel.title} has the units {sorted(units)}; allowed: one")
    metrics = dict.fromkeys(metric for query in panel.queries for metric in query.metrics)
    defaults: dict[str, Any] = {"unit": units.pop(), "min": 0}
    if panel.highest is not None:
        defaults["max"] = panel.highest
    if panel.stacked:
        defaults["custom"] = {"fillOpacity": 40, "stacking": {"mode": "normal"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": "\n".join(f"{metric.name}: {metric.help}" for metric in metrics),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def main(arguments: Sequence[str]) -> int:
    wanted = json.dumps(dashboard(), indent=2) + "\n"
    if "--check" not in arguments:
        FILE.write_text(wanted, encoding="utf-8")
        return 0
    if FILE.exists() and FILE.read_text(encoding="utf-8") == wanted:
        return 0
    print("stale: the Grafana dashboard; to mend it: python deploy/generate_dashboard.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
