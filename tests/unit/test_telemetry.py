"""The metric catalogue keeps Prometheus' rules and our own."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from cp_shared_kv import telemetry
from cp_shared_kv.telemetry import CATALOGUE, Metric


def test_names_are_unique():
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names)) > 30


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_metric_is_well_formed(metric: Metric):
    assert re.fullmatch(r"(sglang|cpkv):[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert "model_name" not in metric.labels
    assert metric.help.endswith(".")
    assert metric.unit


def test_units_in_names_are_the_units_declared():
    for metric in CATALOGUE:
        for unit in ("tokens", "pages", "bytes", "seconds"):
            if metric.name.removesuffix("_total").endswith(f"_{unit}"):
                assert metric.unit == unit


def test_figures_of_one_rank_say_so():
    assert "per_rank" in telemetry.PHYSICAL_TOKENS_PER_RANK.name
    per_rank = [m for m in CATALOGUE if "this rank" in m.help or "one rank's" in m.help]
    assert len(per_rank) >= 5
    assert all("cp_rank" in metric.labels for metric in per_rank)


def test_the_catalogue_needs_neither_torch_nor_the_exporter():
    code = (
        "import sys, cp_shared_kv.telemetry;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'prometheus_client')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
