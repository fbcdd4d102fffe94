"""The documents hang together: links lead somewhere, paths exist, decisions are numbered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/cp_shared_kv"
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("deploy/*.md"),
    ]
)
DECISIONS = sorted(ROOT.glob("docs/adr/0*.md"))
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)


def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)


def anchors(document: Path) -> set[str]:
    """The fragments that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_relative_links_lead_to_a_file_and_a_heading(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if fragment:
            assert fragment in anchors(file), target


@each_document
def test_paths_that_are_named_exist(document: Path) -> None:
    text = prose(document)
    for path in re.findall(r"(?<![\w/.-])((?:src|tests|docs|benchmarks)/[\w/.-]*\w)", text):
        assert (ROOT / path).exists() or path == "benchmarks/results", path


def test_the_architecture_page_names_real_files_and_every_file_of_the_library() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*\w+\.py)`", page))
    assert {name for name in named if not (PACKAGE / name).exists()} == set()
    files = {path.relative_to(PACKAGE) for path in PACKAGE.glob("**/*.py")}
    library = {path for path in files if path.parts[0] != "testing" and path.name != "__init__.py"}
    assert {str(path) for path in library} - named == set()


def test_decisions_are_numbered_from_one_without_gaps() -> None:
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    index = (ROOT / "docs/adr/README.md").read_text()
    for path in DECISIONS:
        assert f"[{path.name[:4]}]({path.name})" in index


@pytest.mark.parametrize("decision", DECISIONS, ids=[path.stem for path in DECISIONS])
def test_a_decision_has_its_number_a_context_a_decision_and_consequences(decision: Path) -> None:
    text = decision.read_text()
    assert text.startswith(f"# {decision.name[:4]} ")
    parts = ["Context", "Decision", "Consequences"]
    assert re.findall(r"^## (\w+)$", text, re.M) == parts
