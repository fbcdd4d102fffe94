"""The application: routes, error handlers, and the figures of the engine behind them."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cp_shared_kv.engine.api import EngineDescription, EngineRefusal, EngineStats
from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.server.access_log import AccessLog
from cp_shared_kv.server.answering import Answering
from cp_shared_kv.server.api_error import ApiError, answer_api_error, answer_http_exception
from cp_shared_kv.server.chat_completions import ChatCompletions
from cp_shared_kv.server.chat_template import ChatTemplate
from cp_shared_kv.server.completions import Completions
from cp_shared_kv.server.engine_client import EngineClient
from cp_shared_kv.server.generation_defaults import GenerationDefaults
from cp_shared_kv.server.metrics import CONTENT_TYPE, ServerMetrics, render
from cp_shared_kv.server.openai_schema import Model, ModelList
from cp_shared_kv.server.request_limits import RequestLimits
from cp_shared_kv.server.server_info import server_info
from cp_shared_kv.server.tokenizer import Tokenizer

STATS_TIMEOUT_SECONDS = 5.0
"""An engine that takes longer to give its figures counts as not answering."""


class _Pages:
    """The endpoints that only show something."""

    def __init__(
        self, client: EngineClient, description: EngineDescription, metrics: ServerMetrics
    ) -> None:
        self._client, self._description, self._metrics = client, description, metrics
        self._model = Model(
            id=description.model_name,
            created=int(time.time()),
            max_model_len=description.context_length,
        )

    async def models(self, _request: Request) -> Response:
        return _json(ModelList([self._model]))

    async def model(self, request: Request) -> Response:
        if request.path_params["model"] != self._model.id:
            raise ApiError(
                404,
                f"no such model; this server has {self._model.id!r}",
                param="model",
                code="model_not_found",
            )
        return _json(self._model)

    async def health(self, _request: Request) -> Response:
        healthy, reason = self._client.healthy()
        if healthy:
            return _json({"status": "ok"})
        return _json({"status": "unavailable", "reason": reason}, 503)

    async def server_info(self, _request: Request) -> Response:
        return _json(server_info(self._description, await self._stats()))

    async def metrics(self, _request: Request) -> Response:
        stats = await self._stats()
        up = stats is not None and self._client.healthy()[0]
        page = render(self._description, stats, self._metrics, up=up)
        return Response(page, headers={"content-type": CONTENT_TYPE})

    async def _stats(self) -> EngineStats | None:
        try:
            return await asyncio.wait_for(self._client.stats(), STATS_TIMEOUT_SECONDS)
        except (EngineRefusal, TimeoutError):
            return None


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    description: EngineDescription,
    *,
    defaults: GenerationDefaults | None = None,
    chat_template: ChatTemplate | None = None,
) -> Starlette:
    """The HTTP application for one engine; `description` is what `client.describe()` gave.

    Raises `CheckpointError` when the tokenizer and the model are not of one checkpoint.
    """
    if tokenizer.vocab_size > description.vocab_size:
        raise CheckpointError(
            "tokenizer.json has more tokens than the model",
            value=f"{tokenizer.vocab_size} against vocab_size {description.vocab_size}",
            change="use the tokenizer that belongs to this model",
        )
    metrics = ServerMetrics()
    pages = _Pages(client, description, metrics)
    answering = Answering(client, tokenizer, description, RequestLimits(description), metrics)
    defaults = defaults or GenerationDefaults()
    completions = Completions(answering, defaults)
    chat = ChatCompletions(answering, defaults, chat_template)
    routes = [
        Route("/v1/models", pages.models),
        Route("/v1/models/{model:path}", pages.model),
        Route("/v1/completions", completions.create, methods=["POST"]),
        Route("/v1/chat/completions", chat.create, methods=["POST"]),
        Route("/health", pages.health),
        Route("/server_info", pages.server_info),
        Route("/get_server_info", pages.server_info),  # its older name in SGLang
        Route("/metrics", pages.metrics),
    ]
    paths = frozenset(route.path for route in routes)
    return Starlette(
        routes=routes,
        middleware=[Middleware(AccessLog, metrics=metrics, paths=paths)],
        exception_handlers={
            ApiError: answer_api_error,
            HTTPException: answer_http_exception,
        },
    )


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
