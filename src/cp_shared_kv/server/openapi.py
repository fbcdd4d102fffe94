"""The API in OpenAPI 3.1, made from the structs that decode and encode it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any

import msgspec

from cp_shared_kv.server.abort import AbortBody, Aborted
from cp_shared_kv.server.chat_schema import ChatBody, ChatChunk, ChatCompletion
from cp_shared_kv.server.completion_schema import Completion, CompletionBody
from cp_shared_kv.server.dashboard_state import DashboardState
from cp_shared_kv.server.loads import Loads
from cp_shared_kv.server.native_schema import ModelInfo, NativeBody, NativeOutput
from cp_shared_kv.server.openai_schema import Model, ModelList
from cp_shared_kv.server.pages import Flushed, Health, Invariants

_SCHEMAS = "#/components/schemas/"
Schemas = Mapping[type | UnionType, dict[str, Any]]
"""What is said of each body and answer."""


@dataclass(frozen=True)
class Operation:
    """One thing that a client can do. `answer` None is JSON without a schema, `media_type` what
    else than JSON it is, `events` the chunks of a streamed answer."""

    method: str
    path: str
    summary: str
    body: type | None = None
    answer: type | UnionType | None = None
    events: type | None = None
    media_type: str = "application/json"


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Continue a chat",
        ChatBody,
        ChatCompletion,
        ChatChunk,
    ),
    Operation("post", "/v1/completions", "Continue a text", CompletionBody, Completion, Completion),
    Operation(
        "post",
        "/generate",
        "Continue a text or token ids, as in SGLang",
        NativeBody,
        NativeOutput | list[NativeOutput],
        NativeOutput,
    ),
    Operation("get", "/v1/models", "The served model, as a list", answer=ModelList),
    Operation("get", "/v1/models/{model}", "One model by its name", answer=Model),
    Operation("get", "/v1/loads", "How busy the engine is", answer=Loads),
    Operation("get", "/health", "Whether the engine's processes answer", answer=Health),
    Operation("get", "/health_generate", "Whether a token comes out of the engine", answer=Health),
    Operation(
        "post", "/abort_request", "End answers that are under way", AbortBody, answer=Aborted
    ),
    Operation(
        "post",
        "/flush_cache",
        "Drop cached prefixes that nobody uses, in prefill and decode",
        answer=Flushed,
    ),
    Operation("get", "/debug/invariants", "Every process checks its books now", answer=Invariants),
    Operation("get", "/dashboard/state", "What the page at / shows", answer=DashboardState),
    Operation("get", "/server_info", "Settings, sizes and use of the engine"),
    Operation("get", "/get_server_info", "The same, by its older name"),
    Operation("get", "/model_info", "Where the model is", answer=ModelInfo),
    Operation("get", "/get_model_info", "The same, by its older name", answer=ModelInfo),
    Operation(
        "get", "/metrics", "Prometheus metrics, with --enable-metrics", media_type="text/plain"
    ),
    Operation("get", "/", "Who owns which pages, live, as a page", media_type="text/html"),
    Operation("get", "/openapi.json", "This description"),
    Operation("get", "/docs", "This description as a page", media_type="text/html"),
)


class ErrorDetail(msgspec.Struct):
    """`param` names the field at fault, `code` the kind of error for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every answer with a status of 400 or more, and the last event of a stream that failed.

    503 comes with Retry-After: the queue is full (code `overloaded`), or the server or its engine
    is not there (`unavailable`). 504 (`timeout`): the request's own `timeout` has passed. 408
    (`request_timeout`): the body did not come.
    """

    error: ErrorDetail


def openapi(version: str) -> dict[str, Any]:
    """The description of this server's API."""
    types: set[type | UnionType] = set()
    types.add(ErrorBody)
    for operation in OPERATIONS:
        shapes = (operation.body, operation.answer, operation.events)
        types.update(shape for shape in shapes if shape is not None)
    ordered = sorted(types, key=str)
    found, components = msgspec.json.schema_components(ordered, ref_template=_SCHEMAS + "{name}")
    schemas = dict(zip(ordered, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "cp-shared-kv",
            "version": version,
            "description": "An OpenAI-compatible server. Where --api-key is set, all but the page "
            "at /, /health, /metrics, /openapi.json and /docs need it. Requests may bring an "
            "x-request-id; every answer has one.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"api_key": []}],
    }


def _described(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    answer = {} if operation.answer is None else {"schema": schemas[operation.answer]}
    content: dict[str, Any] = {operation.media_type: answer}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": schemas[operation.events]}
    described: dict[str, Any] = {
        "operationId": f"{operation.method}{operation.path}".replace("/", "_").strip("{}"),
        "summary": operation.summary,
        "responses": {
            "200": {"description": operation.summary, "content": content},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": schemas[ErrorBody]}},
            },
        },
    }
    if "{model}" in operation.path:
        described["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[operation.body]}},
        }
    return described
