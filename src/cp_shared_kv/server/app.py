"""The application: routes, layers and error handlers."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from cp_shared_kv.engine.api import EngineDescription
from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.server.abort import AbortRequests
from cp_shared_kv.server.access_log import AccessLog
from cp_shared_kv.server.answering import Answering
from cp_shared_kv.server.api_error import ApiError, answer_api_error, answer_http_exception
from cp_shared_kv.server.api_key import ApiKey
from cp_shared_kv.server.chat_completions import ChatCompletions
from cp_shared_kv.server.chat_template import ChatTemplate
from cp_shared_kv.server.completions import Completions
from cp_shared_kv.server.dashboard import Dashboard
from cp_shared_kv.server.docs_page import docs_page
from cp_shared_kv.server.drain import Drain, Gate
from cp_shared_kv.server.engine_client import EngineClient
from cp_shared_kv.server.generation_defaults import GenerationDefaults
from cp_shared_kv.server.metrics import ServerMetrics
from cp_shared_kv.server.native_generate import NativeGenerate
from cp_shared_kv.server.openapi import openapi
from cp_shared_kv.server.pages import Pages
from cp_shared_kv.server.request_limits import RequestLimits
from cp_shared_kv.server.settings import ServerSettings
from cp_shared_kv.server.tokenizer import Tokenizer
from cp_shared_kv.server.under_way import AnswersUnderWay


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    description: EngineDescription,
    *,
    defaults: GenerationDefaults | None = None,
    chat_template: ChatTemplate | None = None,
    settings: ServerSettings | None = None,
    gate: Gate | None = None,
) -> Starlette:
    """The HTTP application for one engine; `description` is what `client.describe()` gave,
    and `gate` is what `serve` closes at the end.

    Raises `CheckpointError` when the tokenizer and the model are not of one checkpoint.
    """
    if tokenizer.vocab_size > description.vocab_size:
        raise CheckpointError(
            "tokenizer.json has more tokens than the model",
            value=f"{tokenizer.vocab_size} against vocab_size {description.vocab_size}",
            change="use the tokenizer that belongs to this model",
        )
    settings = settings or ServerSettings()
    gate = gate or Gate()
    metrics = ServerMetrics()
    pages = Pages(client, description, metrics, gate, enable_metrics=settings.enable_metrics)
    under_way = AnswersUnderWay()
    answering = Answering(
        client, tokenizer, description, RequestLimits(description), metrics, under_way
    )
    defaults = defaults or GenerationDefaults()
    completions = Completions(answering, defaults)
    chat = ChatCompletions(answering, defaults, chat_template)
    dashboard = Dashboard(client, description)
    native = NativeGenerate(answering, defaults)
    answers = [
        Route("/v1/completions", completions.create, methods=["POST"]),
        Route("/v1/chat/completions", chat.create, methods=["POST"]),
        Route("/generate", native.create, methods=["POST"]),
    ]
    routes = [
        Route("/", dashboard.page),
        Route("/dashboard/state", dashboard.state),
        Route("/v1/models", pages.models),
        Route("/v1/models/{model:path}", pages.model),
        *answers,
        Route("/v1/loads", pages.loads),
        Route("/health", pages.health),
        Route("/health_generate", pages.health_generate),
        Route("/abort_request", AbortRequests(under_way).create, methods=["POST"]),
        Route("/flush_cache", pages.flush_cache, methods=["POST"]),
        Route("/debug/invariants", pages.invariants),
        Route("/server_info", pages.server_info),
        Route("/get_server_info", pages.server_info),  # its older name in SGLang
        Route("/model_info", pages.model_info),
        Route("/get_model_info", pages.model_info),  # likewise
        Route("/metrics", pages.metrics),
        *_description_routes(description.version),
    ]
    layers = [Middleware(AccessLog, metrics=metrics, paths=_paths(routes))]
    if settings.api_key is not None:
        layers.append(Middleware(ApiKey, key=settings.api_key))
    layers.append(Middleware(Drain, gate=gate, paths=_paths(answers)))
    return Starlette(
        routes=routes,
        middleware=layers,
        exception_handlers={
            ApiError: answer_api_error,
            HTTPException: answer_http_exception,
        },
    )


def _paths(routes: list[Route]) -> frozenset[str]:
    return frozenset(route.path for route in routes)


def _description_routes(version: str) -> list[Route]:
    described = openapi(version)
    page = docs_page(described)

    async def as_json(_request: Request) -> Response:
        return JSONResponse(described)

    async def as_page(_request: Request) -> Response:
        return HTMLResponse(page)

    return [Route("/openapi.json", as_json), Route("/docs", as_page)]
