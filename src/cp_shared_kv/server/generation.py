"""One request in the engine: its chunks, its times, and its end whichever way it comes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from cp_shared_kv.engine.api import EngineRefusal, GenerateRequest, TokenChunk
from cp_shared_kv.server.access_log import RequestRecord
from cp_shared_kv.server.engine_client import EngineClient
from cp_shared_kv.server.metrics import ServerMetrics


async def generate(
    client: EngineClient, request: GenerateRequest, record: RequestRecord, metrics: ServerMetrics
) -> AsyncGenerator[TokenChunk]:
    """The engine's chunks up to the last one, which has finish reason stop or length.

    Raises `EngineRefusal` for any other end. A consumer that stops early must close the generator
    (`aclosing`): whatever ends it before its last chunk aborts the request in the engine, so that
    its pages are freed.
    """
    over = False
    output_tokens = 0
    previous = record.arrived
    try:
        async with aclosing(client.generate(request)) as chunks:
            async for chunk in chunks:
                now = time.perf_counter()
                new_tokens = len(chunk.token_ids)
                if new_tokens and output_tokens == 0:
                    metrics.time_to_first_token.observe(now - record.arrived)
                    record.notes["first_token_seconds"] = round(now - record.arrived, 6)
                elif new_tokens:
                    metrics.inter_token_latency.observe((now - previous) / new_tokens, new_tokens)
                if new_tokens:
                    previous = now
                output_tokens += new_tokens
                record.notes["completion_tokens"] = output_tokens
                record.notes["cached_tokens"] = chunk.cached_tokens
                if chunk.finish_reason is not None:
                    record.notes["finish_reason"] = chunk.finish_reason
                if chunk.finish_reason == "abort":
                    raise EngineRefusal("the engine ended the request", kind="unavailable")
                if chunk.finish_reason is not None:
                    over = True
                    metrics.request_latency.observe(now - record.arrived)
                yield chunk
                if over:
                    return
        raise EngineRefusal("the engine's output ended without a reason", kind="failed")
    except EngineRefusal as refusal:
        over = True
        record.notes["refusal"] = refusal.reason
        raise
    finally:
        if not over:
            await client.abort(request.request_id)
