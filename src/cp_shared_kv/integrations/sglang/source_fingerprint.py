"""A short hash of a function's or class's source, signature included, read from its file.

Read and not imported: a check of SGLang must not need a GPU, nor load what it checks.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
from functools import lru_cache
from pathlib import Path

from cp_shared_kv.errors import StartupError

HASH_LENGTH = 16
"""Hex digits: enough to see an edit, which is what is looked for here; nobody is an adversary."""


def source_fingerprint(package_root: Path, target: str) -> str:
    """The hash of `target`, a dotted path such as package.module.Class.method.

    package_root: the folder that holds the top package. StartupError when there is no such module,
    or nothing of that name in it.
    """
    path, qualified_name = _module_of(package_root, target)
    lines, nodes = _definitions(path)
    node = nodes.get(qualified_name)
    if node is None:
        raise StartupError("nothing of that name in SGLang", value=target, change=f"see {path}")
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno is not None
    return text_fingerprint("\n".join(lines[first - 1 : node.end_lineno]))


def text_fingerprint(source: str) -> str:
    """The hash of source text; indentation of the whole and blanks at line ends do not count."""
    lines = textwrap.dedent(source).strip("\n").splitlines()
    text = "\n".join(line.rstrip() for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _module_of(package_root: Path, target: str) -> tuple[Path, str]:
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        base = package_root.joinpath(*parts[:length])
        for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if path.is_file():
                return path, ".".join(parts[length:])
    raise StartupError("no such module in SGLang", value=target, change=f"see {package_root}")


@lru_cache(maxsize=32)
def _definitions(path: Path) -> tuple[list[str], dict[str, _Definition]]:
    text = path.read_text(encoding="utf-8")
    nodes: dict[str, _Definition] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, _Definition):
                nodes[prefix + node.name] = node
                if isinstance(node, ast.ClassDef):
                    walk(node.body, f"{prefix}{node.name}.")

    walk(ast.parse(text).body, "")
    return text.splitlines(), nodes
