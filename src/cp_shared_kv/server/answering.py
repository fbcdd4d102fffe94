"""From a checked call to its answer, whichever API it came by."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from cp_shared_kv.engine.api import EngineDescription, EngineRefusal, GenerateRequest
from cp_shared_kv.errors import RequestTooLongError
from cp_shared_kv.server.access_log import RequestRecord, record_of
from cp_shared_kv.server.answer_format import AnswerFormat
from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.choice_text import ChoiceText, Piece
from cp_shared_kv.server.choices import (
    Pieces,
    TokenCounts,
    all_choices,
    one_choice,
)
from cp_shared_kv.server.disconnect import ClientGoneError, while_connected
from cp_shared_kv.server.engine_client import EngineClient
from cp_shared_kv.server.event_stream import EventStream
from cp_shared_kv.server.generation import RequestMeter, generate
from cp_shared_kv.server.generation_call import GenerationCall
from cp_shared_kv.server.metrics import ServerMetrics
from cp_shared_kv.server.request_body import LingeringResponse, read_body
from cp_shared_kv.server.request_limits import RequestLimits
from cp_shared_kv.server.tokenizer import Tokenizer
from cp_shared_kv.server.under_way import AnswerEnd, AnswersUnderWay


@dataclass(frozen=True)
class Asked:
    """One request as its API has understood it. `prompt_param` and `min_tokens_param` are the
    fields to name when these are at fault."""

    call: GenerationCall
    token_ids: list[int]
    answer: AnswerFormat
    default_max_tokens: int
    prompt_param: str
    min_tokens_param: str = "min_tokens"


Understand = Callable[[bytes], Awaitable[Asked]]


@dataclass(frozen=True)
class Answering:
    """What the APIs share: the engine, its limits, and the way from one to the other."""

    client: EngineClient
    tokenizer: Tokenizer
    description: EngineDescription
    limits: RequestLimits
    metrics: ServerMetrics
    under_way: AnswersUnderWay

    async def respond(self, request: Request, understand: Understand) -> Response:
        """Answer one request, whose body `understand` turns into a call or an `ApiError`."""
        record = record_of(request)
        try:
            body = await read_body(request, self.limits.body_bytes)
            return await while_connected(request.receive, self._answer(body, understand, record))
        except ClientGoneError:
            record.client_gone = True
            return Response(status_code=204)
        except EngineRefusal as refusal:
            raise ApiError.from_refusal(refusal) from refusal
        except ApiError as error:
            if error.status != 413:
                raise
            return LingeringResponse(error.body(), 413, media_type="application/json")

    async def _answer(self, body: bytes, understand: Understand, record: RequestRecord) -> Response:
        asked = await understand(body)
        max_tokens = self._checked_max_tokens(asked)
        answer, call = asked.answer, asked.call
        record.notes |= {"id": answer.id, "prompt_tokens": len(asked.token_ids)}
        counts = TokenCounts(len(asked.token_ids))
        pieces = all_choices(
            [
                self._choice(asked, index, max_tokens, counts, record)
                for index in range(call.choices)
            ]
        )
        end = AnswerEnd(call.choices, call.timeout_seconds, record)
        pieces = self.under_way.watched(pieces, end, [answer.id, record.request_id, *call.names])
        if not call.stream:
            return await _whole(answer, call.choices, pieces, counts)
        # The response starts with the first piece, so that a refusal still has its own status.
        first = await anext(pieces)
        return EventStream(
            answer,
            first,
            pieces,
            counts,
            record,
            end,
            include_usage=call.include_usage,
            continuous_usage=call.continuous_usage,
        )

    def _choice(
        self,
        asked: Asked,
        index: int,
        max_tokens: int,
        counts: TokenCounts,
        record: RequestRecord,
    ) -> AsyncGenerator[Piece]:
        sampling = asked.call.sampling_of(index)
        answer_id = asked.answer.id
        request = GenerateRequest(
            request_id=f"{answer_id}-{index}" if index else answer_id,
            prompt_token_ids=asked.token_ids,
            max_tokens=max_tokens,
            sampling=sampling,
        )
        meter = RequestMeter(record, self.metrics)
        ending = {*self.description.eos_token_ids, *sampling.stop_token_ids}
        text = ChoiceText(self.tokenizer, asked.call.stop, ending, sampling.min_tokens)
        chunks = generate(self.client, request, meter)
        return one_choice(chunks, text, counts, meter, first=index == 0)

    def _checked_max_tokens(self, asked: Asked) -> int:
        token_ids, param, call = asked.token_ids, asked.prompt_param, asked.call
        if not token_ids:
            raise ApiError(400, f"{param} has no tokens; allowed: at least one", param=param)
        self.limits.check_token_ids(token_ids, param)
        try:
            # A default that is less than min_tokens would leave no number to generate.
            default = max(asked.default_max_tokens, call.sampling.min_tokens)
            max_tokens = self.limits.output_tokens(len(token_ids), call.max_tokens, default)
        except RequestTooLongError as error:
            raise ApiError(400, str(error), param=param, code="context_length_exceeded") from error
        if call.sampling.min_tokens > max_tokens:
            raise ApiError(
                400,
                f"{asked.min_tokens_param} is {call.sampling.min_tokens}; allowed: at most "
                f"{max_tokens}, for which a prompt of this length leaves room",
                param=asked.min_tokens_param,
            )
        return max_tokens


async def _whole(
    answer: AnswerFormat, choices: int, pieces: Pieces, counts: TokenCounts
) -> Response:
    """All of the answer in one response. Raises what `pieces` does."""
    texts: list[list[str]] = [[] for _ in range(choices)]
    whole = [Piece() for _ in range(choices)]
    async with aclosing(pieces):
        async for index, piece in pieces:
            texts[index].append(piece.text)
            choice = whole[index]
            choice.tokens += piece.tokens
            choice.token_ids += piece.token_ids
            choice.logprobs += piece.logprobs
            choice.finish_reason, choice.matched = piece.finish_reason, piece.matched
    for choice, text in zip(whole, texts, strict=True):
        choice.text = "".join(text)
    return Response(answer.whole(whole, counts.usage()), media_type="application/json")
