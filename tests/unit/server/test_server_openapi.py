"""The API's description: complete, sound, and a page that fetches nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from cp_shared_kv.server.app import create_app
from cp_shared_kv.server.chat_schema import ChatBody


def references(value) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if "$ref" in value else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_route_is_described_and_no_other(http, tokenizer, description):
    paths = http.get("/openapi.json").json()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    app = create_app(None, tokenizer, description)
    routed = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        for method in route.methods - {"HEAD"}
    }
    assert described == routed


def test_every_reference_leads_to_a_schema(http):
    description = http.get("/openapi.json").json()
    assert description["openapi"].startswith("3.1")
    schemas = {f"#/components/schemas/{name}" for name in description["components"]["schemas"]}
    assert references(description) <= schemas
    ids = [o["operationId"] for methods in description["paths"].values() for o in methods.values()]
    assert len(set(ids)) == len(ids)


def test_schemas_are_those_that_requests_are_checked_by(http):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert set(schemas["ChatBody"]["properties"]) == set(ChatBody.__struct_fields__)
    assert schemas["ChatBody"]["required"] == ["model", "messages"]
    assert schemas["CompletionBody"]["required"] == ["model", "prompt"]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_the_page_shows_all_of_it_and_fetches_nothing(http):
    response = http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    page = Tags()
    page.feed(response.text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe"}
    links = [attributes["href"] for _, attributes in page.tags if "href" in attributes]
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert {link for link in links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in links if link.startswith("#")} <= ids
    for path in http.get("/openapi.json").json()["paths"]:
        assert path in response.text
    assert not re.search(r"url\(|@import", response.text)
