"""/docs: the OpenAPI description as one plain page, without scripts or anything to fetch."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 14px ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem; }
th, td { border-bottom: 1px solid #8884; padding: .2rem .6rem .2rem 0; text-align: left; }
td, th { vertical-align: top; }
:root { color-scheme: light dark; }
"""


def docs_page(description: dict[str, Any]) -> str:
    """The page of an OpenAPI 3.1 description, as HTML."""
    return "\n".join(_page(description))


def _page(description: dict[str, Any]) -> Iterator[str]:
    info = description["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
    yield f"<p>{escape(info['description'])}</p>"
    yield '<p>For programs: <a href="openapi.json">openapi.json</a></p><h2>Paths</h2><table>'
    yield "<tr><th>Path</th><th></th><th>Body</th><th>Answer</th></tr>"
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            body = _links(operation.get("requestBody", {}).get("content", {}))
            answer = _links(operation["responses"]["200"]["content"])
            name = f"<code>{method.upper()} {escape(path)}</code>"
            yield f"<tr><td>{name}</td><td>{escape(operation['summary'])}</td>"
            yield f"<td>{body}</td><td>{answer}</td></tr>"
    yield "</table><h2>Objects</h2>"
    for name, schema in description["components"]["schemas"].items():
        yield from _schema(name, schema)
    yield "</body></html>"


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<h3 id="{escape(name)}">{escape(name)}</h3>'
    for paragraph in schema.get("description", "").split("\n\n"):
        yield f"<p>{escape(paragraph)}</p>"
    yield "<table><tr><th>Field</th><th>Type</th><th></th></tr>"
    required = set(schema.get("required", ()))
    for field, kind in schema.get("properties", {}).items():
        note = "required" if field in required else ""
        yield f"<tr><td><code>{escape(field)}</code></td><td>{_type(kind)}</td><td>{note}</td></tr>"
    yield "</table>"


def _links(content: dict[str, Any]) -> str:
    kinds = [_type(entry["schema"]) for entry in content.values() if "schema" in entry]
    return ", ".join(dict.fromkeys(kinds))


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        items = schema.get("items")
        return f"list of {_type(items)}" if items else "list"
    return escape(str(schema.get("type", "anything")))
