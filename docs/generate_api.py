"""Writes docs/api, the reference of the library's public names, from signatures and docstrings.

Reads source text only, so it needs nothing installed. `--check` writes nothing, and exits with 1
where a page is not what would be written.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/cp_shared_kv"
PAGES = ROOT / "docs/api"
LAYERS = {
    "layout": "layout/**/*.py",
    "memory": "memory/**/*.py",
    "reads": "reads/**/*.py",
    "transfer": "transfer/**/*.py",
    "engine": "engine/api.py",
}
# Steps of a layer that nobody outside of it calls. docs/architecture.md says what they do.
INTERNAL = {
    "layout.checks",
    "layout.stripes",
    "memory.formats.block_fp8",
    "reads.chunk_exchange",
    "transfer.codec",
    "transfer.local_regions",
    "transfer.mooncake",
    "transfer.mooncake_lane",
    "transfer.mooncake_session",
    "transfer.mooncake_settings",
    "transfer.mooncake_sockets",
    "transfer.mooncake_write",
    "transfer.strided_copy",
}
ORIGIN = "Written by `docs/generate_api.py` from the docstrings: edit those, then run it."
INTRODUCTION = """\
What an engine of your own calls. Names with a leading underscore, and modules that are not listed,
may change without notice. What is raised on purpose is in `cp_shared_kv.errors`. `CpSharedKVLayout`
and `KVCapacity` can be imported from `cp_shared_kv`, all of layout from `cp_shared_kv.layout`, the
rest from its modules. The [examples](../../examples/README.md) show how the parts go together."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def pages() -> dict[str, str]:
    """The text of every page, by file name."""
    texts: dict[str, str] = {}
    rows: list[str] = []
    for layer, pattern in LAYERS.items():
        parts = [f"# {layer}", ORIGIN]
        for path in sorted(PACKAGE.glob(pattern)):
            relative = path.relative_to(PACKAGE).with_suffix("")
            name = ".".join(relative.parts)
            if relative.name == "__init__" or name in INTERNAL:
                continue
            module = Module(f"cp_shared_kv.{name}", path.read_text(encoding="utf-8"))
            parts += module.parts()
            anchor = module.name.replace(".", "")
            rows.append(f"| [{module.name}]({layer}.md#{anchor}) | {module.contents()} |")
        texts[f"{layer}.md"] = "\n\n".join(parts) + "\n"
    table = "\n".join(["| module | names |", "| --- | --- |", *rows])
    texts["README.md"] = f"# API reference\n\n{ORIGIN}\n\n{INTRODUCTION}\n\n{table}\n"
    return texts


class Module:
    """One module's part of a page."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self._lines = source.splitlines()
        self._tree = ast.parse(source)

    def contents(self) -> str:
        """Its public names, in order."""
        found = [defined_name(node) for node in self._tree.body]
        return ", ".join(f"`{name}`" for name in dict.fromkeys(filter(is_public, found)))

    def parts(self) -> Iterator[str]:
        yield f"## {self.name}"
        yield prose(ast.get_docstring(self._tree))
        yield from self._values(self._tree.body)
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef) and is_public(node.name):
                yield from self._class(node)
        yield from self._functions(self._tree.body, "###", owner="")

    def _class(self, node: ast.ClassDef) -> Iterator[str]:
        yield f"### class {node.name}"
        bases = ", ".join(ast.unparse(base) for base in (*node.bases, *node.keywords))
        yield code([*decorators(node), f"class {node.name}" + (f"({bases})" if bases else "")])
        if text := ast.get_docstring(node):
            yield prose(text)
        yield from self._values(node.body)
        yield from self._functions(node.body, "####", owner=node.name)

    def _values(self, body: Sequence[ast.stmt]) -> Iterator[str]:
        """Fields, constants and aliases, with the text that stands below each."""
        items: list[str] = []
        for node, following in zip(body, (*body[1:], None), strict=True):
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_public(defined_name(node)):
                item = f"* `{' '.join(self._source(node, node).split())}`"
                text = text_of(following)
                items.append(f"{item}: {' '.join(prose(text).split())}" if text else item)
        if items:
            yield "\n".join(items)

    def _functions(self, body: Sequence[ast.stmt], heading: str, *, owner: str) -> Iterator[str]:
        functions: dict[str, list[Function]] = {}
        for node in body:
            if isinstance(node, Function) and (is_public(node.name) or node.name == "__init__"):
                functions.setdefault(node.name, []).append(node)
        for name, forms in functions.items():
            title = f"{owner}.{name}" if owner else name
            yield f"{heading} {owner + '()' if name == '__init__' else title}"
            # Of an overloaded function the forms that callers see, and the last one's text.
            seen = [form for form in forms if "@overload" in decorators(form)] or forms
            yield code([line for form in seen for line in self._signature(form)])
            if text := ast.get_docstring(forms[-1]):
                yield prose(text)

    def _signature(self, node: Function) -> list[str]:
        if node.returns is None:
            raise SystemExit(f"{self.name}.{node.name} does not say what it returns")
        marks = [mark for mark in decorators(node) if mark != "@overload"]
        return [*marks, self._source(node, node.returns)]

    def _source(self, first: ast.stmt, last: ast.stmt | ast.expr) -> str:
        """The source from the line of `first` to the end of `last`, as it is formatted there."""
        lines = self._lines[first.lineno - 1 : last.end_lineno]
        lines[-1] = lines[-1].encode()[: last.end_col_offset].decode()
        return textwrap.dedent("\n".join(lines))


def defined_name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ClassDef | Function):
        return node.name
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def is_public(name: str | None) -> bool:
    return name is not None and not name.startswith("_")


def decorators(node: ast.ClassDef | Function) -> list[str]:
    return [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]


def text_of(node: ast.stmt | None) -> str | None:
    """The string that a statement consists of, if it does."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def code(lines: Sequence[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def prose(text: str | None) -> str:
    """A docstring as Markdown. A paragraph that is indented is a drawing and stays as it is."""
    paragraphs = (text or "").split("\n\n")
    return "\n\n".join(p if p.startswith("    ") else escaped(p) for p in paragraphs)


def escaped(paragraph: str) -> str:
    """Outside of `code` a star is a star, and brackets are no link."""
    pieces = re.split(r"(`[^`]*`)", paragraph)
    return "".join(p if p.startswith("`") else re.sub(r"([*<\[\]])", r"\\\1", p) for p in pieces)


def main(arguments: Sequence[str]) -> int:
    wanted = pages()
    if "--check" not in arguments:
        PAGES.mkdir(exist_ok=True)
        for name, text in wanted.items():
            (PAGES / name).write_text(text, encoding="utf-8")
        return 0
    found = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    stale = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if stale:
        print(f"stale in docs/api: {', '.join(stale)}; to mend it: python docs/generate_api.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
