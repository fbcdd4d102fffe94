"""One request in the engine: its chunks, its times, and its end whichever way it comes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from cp_shared_kv.engine.api import EngineRefusal, GenerateRequest, TokenChunk
from cp_shared_kv.server.access_log import RequestRecord
from cp_shared_kv.server.engine_client import EngineClient
from cp_shared_kv.server.metrics import ServerMetrics


class RequestMeter:
    """Times and counts of one request in the engine, for the metrics and the log line.

    An answer of several choices has a meter for each; they share the record of its log line.
    """

    def __init__(self, record: RequestRecord, metrics: ServerMetrics) -> None:
        self._record, self._metrics = record, metrics
        self._previous: float | None = None
        self._finished = False

    def tokens(self, count: int, cached_tokens: int) -> None:
        """So many more output tokens have come."""
        notes, now = self._record.notes, time.perf_counter()
        if count and self._previous is None:
            seconds = now - self._record.arrived
            self._metrics.time_to_first_token.observe(seconds)
            notes.setdefault("first_token_seconds", round(seconds, 6))
            notes.setdefault("cached_tokens", cached_tokens)
        elif count and self._previous is not None:
            self._metrics.inter_token_latency.observe((now - self._previous) / count, count)
        if count:
            self._previous = now
        self._record.completion_tokens += count
        notes["completion_tokens"] = self._record.completion_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the client has all of its answer."""
        return self._finished

    def finished(self, reason: str) -> None:
        """The last token has come, or a stop string made one the last. Later calls do nothing."""
        if self._finished:
            return
        self._finished = True
        self._record.notes["finish_reason"] = reason
        self._metrics.request_latency.observe(time.perf_counter() - self._record.arrived)

    def refused(self, reason: str) -> None:
        """The engine did not take the request, or could not finish it."""
        self._record.notes["refusal"] = reason


async def generate(
    client: EngineClient, request: GenerateRequest, meter: RequestMeter
) -> AsyncGenerator[TokenChunk]:
    """The engine's chunks up to the last one, which has finish reason stop or length.

    Raises `EngineRefusal` for any other end. A consumer that stops early must close the generator
    (`aclosing`): whatever ends it before its last chunk aborts the request in the engine, so that
    its pages are freed.
    """
    over = False
    try:
        async with aclosing(client.generate(request)) as chunks:
            async for chunk in chunks:
                meter.tokens(len(chunk.token_ids), chunk.cached_tokens)
                if chunk.finish_reason == "abort":
                    raise EngineRefusal("the engine ended the request", kind="unavailable")
                over = chunk.finish_reason is not None
                yield chunk
                if over:
                    return
        raise EngineRefusal("the engine's output ended without a reason", kind="failed")
    except EngineRefusal as refusal:
        over = True
        meter.refused(refusal.reason)
        raise
    finally:
        if not over:
            await client.abort(request.request_id, finished=meter.is_finished)
