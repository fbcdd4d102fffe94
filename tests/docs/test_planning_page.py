"""The planning pages say what the results and the code say, and the check of them can fail."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cp_shared_kv.cli.app import run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    """docs/generate_planning.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "generate_planning", ROOT / "docs/generate_planning.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("generate_planning", None)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The results alone, in a place where they can be changed."""
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    return tmp_path


def test_the_page_of_results_is_what_the_files_give(generator: ModuleType) -> None:
    assert (ROOT / generator.PAGE).read_text() == generator.page(ROOT)


def test_another_result_makes_another_page(generator: ModuleType, copied: Path) -> None:
    path = copied / "benchmarks/results/simulate-users-16.json"
    content = json.loads(path.read_text())
    content["cases"][0]["hit_rate"] = 0.9876
    path.write_text(json.dumps(content))
    page = generator.page(copied)
    assert "98.8%" in page
    assert page != generator.page(ROOT)


def test_plans_in_the_guide_are_what_the_command_prints(generator: ModuleType) -> None:
    text = (ROOT / generator.GUIDE).read_text()
    commands = [found[1] for found in generator.CONSOLE.finditer(text)]
    for model in ("deepseek-v3.2", "glm-5.2"):
        for gpu in ("h200", "h20"):
            assert f"cpkv plan {model} --gpu {gpu}" in commands
    assert text == generator.guide(text)
    assert text != generator.guide(text.replace("--gpu h200", "--gpu b200"))


def test_pictures_are_those_of_the_results(generator: ModuleType, tmp_path: Path) -> None:
    fresh = generator.draw(ROOT, tmp_path)
    kept = {path.name: path.read_text() for path in (ROOT / generator.PAGE).parent.glob("*.svg")}
    assert {path.name for path in fresh} == set(kept)
    if not all(map(generator.same_matplotlib, kept.values())):
        pytest.skip("another release of matplotlib drew them")
    for path in fresh:
        assert path.read_text() == kept[path.name], f"{path.name} is stale"


def test_figures_of_the_findings_are_among_the_results(generator: ModuleType) -> None:
    guide, page = (ROOT / generator.GUIDE).read_text(), (ROOT / generator.PAGE).read_text()
    findings = guide.split("## What was found")[1].split("### Against")[0]
    figures = re.findall(r"\d[\d.,]*(?:%|x\b)|\d+\.\d+(?= s\b)", findings)
    assert len(figures) > 15
    assert {figure for figure in figures if figure not in page} == set()
    readme = (ROOT / "README.md").read_text().split("## Planning")[1].split("\n## ")[0]
    assert all(figure in page for figure in re.findall(r"\d+\.\d%", readme))


def test_the_example_of_the_readme_finds_what_is_said_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = (ROOT / "README.md").read_text().split("## Planning")[1].split("\n## ")[0]
    found = re.search(r"cpkv (simulate tests/\S+ .*)", planning)
    said = re.findall(r"(\d+\.\d) %", planning)
    assert found is not None
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["cpkv", *found[1].split(), "--json"])
    assert run() == 0
    rates = {
        row["multiplier"]: row["hit_rate"] for row in json.loads(capsys.readouterr().out)["cases"]
    }
    assert said == [f"{100 * rates[pools]:.1f}" for pools in (1, 4)]


def test_every_run_was_made_from_committed_code_with_the_settings_that_its_command_has(
    generator: ModuleType,
) -> None:
    for name, arguments in generator.RUNS.items():
        content = generator.load(ROOT, name)
        settings, case = content["settings"], content["cases"][0]
        assert content["uncommitted_changes"] is False, name
        assert re.fullmatch("[0-9a-f]{40}", content["commit"]), name
        assert (settings["physical_tokens"], settings["answers"]) == (237_312, "recorded"), name
        assert settings["requests"] == case["requests"] == 20_000, name
        assert f"--users {case['users']}" in arguments, name
        assert ("--descriptors" in arguments) == settings["descriptors"], name
        if settings["groups"] > 1:
            assert f"--prefill-groups {settings['groups']}" in arguments, name
            policy = re.search(r"--router-policy (\w+)", arguments)
            assert settings["router_policy"] == (policy[1] if policy else "longest_prefix"), name
