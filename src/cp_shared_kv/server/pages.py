"""The endpoints that show the engine, and the one that empties its cache."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cp_shared_kv.engine.api import (
    EngineDescription,
    EngineRefusal,
    GenerateRequest,
    Sampling,
)
from cp_shared_kv.server.access_log import record_of
from cp_shared_kv.server.api_error import STOPPING, ApiError
from cp_shared_kv.server.current_figures import current_page_maps, current_stats
from cp_shared_kv.server.drain import Gate
from cp_shared_kv.server.engine_client import EngineClient
from cp_shared_kv.server.generation import RequestMeter, generate
from cp_shared_kv.server.loads import loads
from cp_shared_kv.server.metrics import CONTENT_TYPE, ServerMetrics, render
from cp_shared_kv.server.native_schema import ModelInfo
from cp_shared_kv.server.openai_schema import Model, ModelList
from cp_shared_kv.server.server_info import server_info

HEALTH_GENERATE_SECONDS = 20.0
"""As in SGLang: a token that takes longer counts as none."""


class Health(msgspec.Struct, omit_defaults=True):
    """GET /health and /health_generate; the reason is there when the status is `unavailable`."""

    status: str
    reason: str = ""


class Flushed(msgspec.Struct):
    """POST /flush_cache: what was dropped, in logical pages and tokens."""

    dropped_pages: int
    dropped_tokens: int


class Invariants(msgspec.Struct):
    """GET /debug/invariants: by process, what does not add up in its books."""

    balanced: bool
    problems: dict[str, list[str]]


class Pages:
    """One method an endpoint."""

    def __init__(
        self,
        client: EngineClient,
        description: EngineDescription,
        metrics: ServerMetrics,
        gate: Gate,
        *,
        enable_metrics: bool,
    ) -> None:
        self._client, self._description, self._metrics = client, description, metrics
        self._gate = gate
        self._enable_metrics = enable_metrics
        self._model = Model(
            id=description.model_name,
            created=int(time.time()),
            max_model_len=description.context_length,
        )

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return _json(ModelList([self._model]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        if request.path_params["model"] != self._model.id:
            raise ApiError(
                404,
                f"no such model; this server has {self._model.id!r}",
                param="model",
                code="model_not_found",
            )
        return _json(self._model)

    async def health(self, _request: Request) -> Response:
        """GET /health: whether the engine's processes answer, and the server is not stopping."""
        if self._gate.closed:
            return _unavailable(STOPPING)
        healthy, reason = self._client.healthy()
        return _json(Health("ok")) if healthy else _unavailable(reason)

    async def health_generate(self, request: Request) -> Response:
        """GET /health_generate: whether one token comes out of the engine."""
        probe = GenerateRequest(
            request_id=f"health-{uuid.uuid4().hex}",
            prompt_token_ids=[0],
            max_tokens=1,
            sampling=Sampling(ignore_eos=True),
        )
        # Probes are no requests of clients: their times stay out of the metrics.
        meter = RequestMeter(record_of(request), ServerMetrics())
        try:
            async with (
                asyncio.timeout(HEALTH_GENERATE_SECONDS),
                aclosing(generate(self._client, probe, meter)) as chunks,
            ):
                async for _chunk in chunks:
                    pass
        except EngineRefusal as refusal:
            return _unavailable(refusal.reason)
        except TimeoutError:
            return _unavailable(f"no token within {HEALTH_GENERATE_SECONDS:g} s")
        return _json(Health("ok"))

    async def loads(self, _request: Request) -> Response:
        """GET /v1/loads."""
        stats = await current_stats(self._client)
        if stats is None:
            raise _no_answer()
        return _json(loads(self._description, stats))

    async def flush_cache(self, _request: Request) -> Response:
        """POST /flush_cache: drop the cached prefixes that no request uses."""
        try:
            pages = await self._client.flush_cache()
        except EngineRefusal as refusal:
            raise ApiError.from_refusal(refusal) from refusal
        return _json(Flushed(pages, pages * self._description.page_size))

    async def invariants(self, _request: Request) -> Response:
        """GET /debug/invariants: every process checks its books now. 503 if some do not balance."""
        try:
            problems = await self._client.check_invariants()
        except EngineRefusal as refusal:
            raise ApiError.from_refusal(refusal) from refusal
        balanced = not any(problems.values())
        return _json(Invariants(balanced, problems), 200 if balanced else 503)

    async def server_info(self, _request: Request) -> Response:
        """GET /server_info."""
        return _json(server_info(self._description, await current_stats(self._client)))

    async def model_info(self, _request: Request) -> Response:
        """GET /model_info."""
        path = str(self._description.config["model_path"])
        return _json(
            ModelInfo(model_path=path, tokenizer_path=path, served_model_name=self._model.id)
        )

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics, where they were asked for at the start."""
        if not self._enable_metrics:
            raise ApiError(
                404, "metrics are off; start the server with --enable-metrics", code="metrics_off"
            )
        stats, pools = await asyncio.gather(
            current_stats(self._client), current_page_maps(self._client, most_bins=1)
        )
        up = stats is not None and self._client.healthy()[0]
        page = render(self._description, stats, pools, self._metrics, up=up)
        return Response(page, headers={"content-type": CONTENT_TYPE})


def _no_answer() -> ApiError:
    refusal = EngineRefusal("the engine does not answer", kind="unavailable")
    return ApiError.from_refusal(refusal)


def _unavailable(reason: str) -> Response:
    return _json(Health("unavailable", reason), 503)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
