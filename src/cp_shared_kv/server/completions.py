"""POST /v1/completions, streamed and not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from cp_shared_kv.engine.api import (
    EngineDescription,
    EngineRefusal,
    GenerateRequest,
    Sampling,
)
from cp_shared_kv.errors import RequestTooLongError
from cp_shared_kv.server.access_log import RequestRecord, record_of
from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.completion_answer import (
    CompletionAnswer,
    CompletionStream,
    whole_completion,
)
from cp_shared_kv.server.completion_request import CompletionCall, parse_completion
from cp_shared_kv.server.disconnect import ClientGoneError, while_connected
from cp_shared_kv.server.engine_client import EngineClient
from cp_shared_kv.server.generation import generate
from cp_shared_kv.server.metrics import ServerMetrics
from cp_shared_kv.server.request_body import LingeringResponse, read_body
from cp_shared_kv.server.request_limits import RequestLimits
from cp_shared_kv.server.tokenizer import Tokenizer


@dataclass(frozen=True)
class Completions:
    """The endpoint and what it needs."""

    client: EngineClient
    tokenizer: Tokenizer
    description: EngineDescription
    limits: RequestLimits
    metrics: ServerMetrics

    async def create(self, request: Request) -> Response:
        """Answer one request; `openai_schema.CompletionBody` says what it may hold."""
        record = record_of(request)
        try:
            body = await read_body(request, self.limits.body_bytes)
            call = parse_completion(body, self.description.model_name)
            return await while_connected(request.receive, self._answer(call, record))
        except ClientGoneError:
            record.client_gone = True
            return Response(status_code=204)
        except EngineRefusal as refusal:
            raise ApiError.from_refusal(refusal) from refusal
        except ApiError as error:
            if error.status != 413:
                raise
            return LingeringResponse(error.body(), 413, media_type="application/json")

    async def _answer(self, call: CompletionCall, record: RequestRecord) -> Response:
        token_ids = call.prompt
        if isinstance(token_ids, str):
            # Off the event loop: a prompt of a million tokens takes about a second.
            token_ids = await asyncio.to_thread(self.tokenizer.encode, token_ids)
        max_tokens = self._checked_max_tokens(token_ids, call.max_tokens)
        answer = CompletionAnswer(
            self.description.model_name,
            len(token_ids),
            self.tokenizer,
            self.description.eos_token_ids,
        )
        record.notes |= {"id": answer.id, "prompt_tokens": len(token_ids)}
        generation = GenerateRequest(
            request_id=answer.id,
            prompt_token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=Sampling(ignore_eos=call.ignore_eos),
        )
        chunks = generate(self.client, generation, record, self.metrics)
        if not call.stream:
            return await whole_completion(answer, chunks)
        # The response starts with the first chunk, so that a refusal still has its own status.
        first = await anext(chunks)
        return CompletionStream(
            answer,
            first,
            chunks,
            record,
            include_usage=call.include_usage,
            continuous_usage=call.continuous_usage,
        )

    def _checked_max_tokens(self, token_ids: list[int], max_tokens: int | None) -> int:
        if not token_ids:
            raise ApiError(400, "prompt has no tokens; allowed: at least one", param="prompt")
        self.limits.check_token_ids(token_ids)
        try:
            return self.limits.output_tokens(len(token_ids), max_tokens)
        except RequestTooLongError as error:
            raise ApiError(
                400, str(error), param="prompt", code="context_length_exceeded"
            ) from error
