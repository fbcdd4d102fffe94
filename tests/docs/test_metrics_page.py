"""docs/metrics.md is what the catalogue gives, and the check of it can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from cp_shared_kv.telemetry import CATALOGUE, LABELS, SECTIONS

ROOT = Path(__file__).parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    # -S: no installed package is in reach.
    command = [sys.executable, "-S", str(root / "docs/generate_metrics.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_committed_page_is_what_the_catalogue_gives() -> None:
    done = check(ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_changed_unit_is_noticed(tmp_path: Path) -> None:
    for file in ("docs/generate_metrics.py", "docs/metrics.md", "src/cp_shared_kv/telemetry.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    assert check(tmp_path).returncode == 0
    source = tmp_path / "src/cp_shared_kv/telemetry.py"
    source.write_text(source.read_text().replace('"GiB"', '"GB"'))
    done = check(tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("stale: docs/metrics.md;")


def test_every_metric_is_in_one_section_and_every_label_is_explained() -> None:
    assert [metric for metrics in SECTIONS.values() for metric in metrics] == list(CATALOGUE)
    assert {label for metric in CATALOGUE for label in metric.labels} == set(LABELS) - {
        "model_name"
    }


def test_every_metric_stands_on_the_page_with_its_unit_and_beside_those_of_others() -> None:
    lines = (ROOT / "docs/metrics.md").read_text().splitlines()
    for metric in CATALOGUE:
        own = [line for line in lines if line.startswith(f"| `{metric.name}` | ")]
        assert len(own) == 2, metric.name
        assert f" | {metric.kind} | {metric.unit} | " in own[0]
        assert metric.name.startswith("cpkv:") != (own[1].split(" | ")[1] == "same")
