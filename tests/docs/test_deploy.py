"""What deploy/ holds fits the metrics that there are, and its parts fit each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.telemetry import CATALOGUE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/cp-shared-kv.json").read_text())
PANELS: list[dict[str, Any]] = [p for p in DASHBOARD["panels"] if p["type"] != "row"]
BY_NAME = {metric.name: metric for metric in CATALOGUE}
each_panel = pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])


def named(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:sglang|cpkv|vllm):\w+", expression))


def family(name: str) -> str:
    """The metric of a series: of a histogram's buckets the histogram."""
    base = name.removesuffix("_bucket")
    return base if base in BY_NAME and BY_NAME[base].kind == "histogram" else name


def test_the_committed_dashboard_is_what_the_catalogue_gives() -> None:
    command = [sys.executable, "-S", str(DEPLOY / "generate_dashboard.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@each_panel
def test_a_panel_has_a_unit_a_description_and_metrics_of_the_catalogue(
    panel: dict[str, Any],
) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    for target in panel["targets"]:
        names = named(target["expr"])
        assert names
        assert target["legendFormat"]
        for name in names:
            assert family(name) in BY_NAME
            assert f"{family(name)}: {BY_NAME[family(name)].help}" in panel["description"]


@each_panel
def test_a_panel_asks_for_labels_that_its_metrics_have(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        groups = re.findall(r"by \(([^)]*)\)", target["expr"])
        asked = {label for group in groups for label in group.split(", ")} - {"le"}
        asked |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for name in named(target["expr"]):
            assert asked <= set(BY_NAME[family(name)].labels), name


@each_panel
def test_counters_are_shown_by_their_growth_and_gauges_as_they_are(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for name in named(target["expr"]):
            grown = f"rate({name}{{" in target["expr"]
            assert grown == (BY_NAME[family(name)].kind != "gauge"), name


def test_panels_stand_beside_each_other_and_none_on_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_every_metric_with_a_rank_is_on_some_panel() -> None:
    shown = {
        family(name)
        for panel in PANELS
        for target in panel["targets"]
        for name in named(target["expr"])
    }
    assert {m.name for m in CATALOGUE if "dp_rank" in m.labels} <= shown


def test_the_containers_are_pinned_and_what_they_mount_is_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"prometheus", "grafana"}
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), name
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), mount


def test_prometheus_asks_the_servers_default_port_and_grafana_asks_prometheus() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    (job,) = scraped
    config = EngineConfig(model_path=Path("demo"))
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": [f"{config.host}:{config.port}"]}]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    provisioning = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    address = source["url"].removeprefix("http://")
    assert f"--web.listen-address={address}" in compose["services"]["prometheus"]["command"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/cp-shared-kv.yaml").read_text())[
        "providers"
    ]
    mounted = [mount.split(":")[1] for mount in compose["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted
