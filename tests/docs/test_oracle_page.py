"""docs/oracle.md is what the newest result says, and the check of it can fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def generate(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -S: no installed package is in reach.
    command = [sys.executable, "-S", str(root / "docs/generate_oracle.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_committed_page_is_what_the_newest_result_gives() -> None:
    done = generate(ROOT, "--check")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_newer_result_makes_the_page_stale_and_what_it_misses_is_named(tmp_path: Path) -> None:
    for folder in ("docs", "benchmarks/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    newest = max((tmp_path / "benchmarks/results").glob("oracle-*.json"))
    content = json.loads(newest.read_text())
    row = content["config"]["table"][0]
    row["met"], row["relative_error"] = False, 0.25
    newest.with_name("oracle-99991231T235959Z.json").write_text(json.dumps(content))
    assert generate(tmp_path, "--check").returncode == 1
    assert generate(tmp_path).returncode == 0
    page = (tmp_path / "docs/oracle.md").read_text()
    assert f"**Missed by** {row['model']}" in page
    assert f"| {row['model']} | 2.5e-01 |" in page
    assert "oracle-99991231T235959Z.json" in page
