"""docs/api is what the docstrings say, and the check of it can fail."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    # -S: no installed package is in reach, torch included.
    command = [sys.executable, "-S", str(root / "docs/generate_api.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_committed_pages_are_what_the_docstrings_give() -> None:
    done = check(ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_changed_docstring_and_a_forgotten_page_are_noticed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    assert check(tmp_path).returncode == 0
    source = tmp_path / "src/cp_shared_kv/layout/capacity.py"
    source.write_text(source.read_text().replace("Tokens that one rank", "Tokens which one rank"))
    (tmp_path / "docs/api/gone.md").write_text("a layer that is no more\n")
    done = check(tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("stale in docs/api: layout.md, gone.md;")


def test_every_public_class_and_function_is_described() -> None:
    pages = "".join(path.read_text() for path in ROOT.glob("docs/api/*.md"))
    names = [
        line.split(" ")[-1]
        for line in pages.splitlines()
        if line.startswith(("### ", "### class ")) and "." not in line
    ]
    assert {"CpSharedKVLayout", "LogicalPool", "ForwardKV", "PrefillSession", "Sampling"} <= set(
        names
    )
    undescribed = set[str]()
    for path in (ROOT / "src/cp_shared_kv").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not ast.get_docstring(node):
                undescribed.add(node.name)
    assert sorted(undescribed & set(names)) == []
