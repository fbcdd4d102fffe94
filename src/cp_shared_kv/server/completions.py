"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from cp_shared_kv.server.answering import Answering, Asked
from cp_shared_kv.server.completion_answer import CompletionFormat
from cp_shared_kv.server.completion_request import checked_completion, one_prompt
from cp_shared_kv.server.completion_schema import CompletionBody
from cp_shared_kv.server.generation_call import check_model
from cp_shared_kv.server.generation_defaults import GenerationDefaults
from cp_shared_kv.server.json_body import decode_body
from cp_shared_kv.server.request_limits import DEFAULT_MAX_TOKENS
from cp_shared_kv.server.token_text import TokenTexts


@dataclass(frozen=True)
class Completions:
    """The endpoint and what it needs."""

    answering: Answering
    defaults: GenerationDefaults

    async def create(self, request: Request) -> Response:
        """Answer one request; `CompletionBody` says what it may hold."""
        return await self.answering.respond(request, self._understand)

    async def _understand(self, body: bytes) -> Asked:
        tokenizer, description = self.answering.tokenizer, self.answering.description
        fields = decode_body(body, CompletionBody)
        check_model(fields.model, description.model_name)
        call = checked_completion(fields, self.defaults, description.vocab_size)
        prompt = one_prompt(fields.prompt)
        echo = ""
        # Off the event loop: a prompt of a million tokens takes about a second.
        if isinstance(prompt, str):
            token_ids = await asyncio.to_thread(tokenizer.encode, prompt)
            echo = prompt if fields.echo else ""
        else:
            token_ids = prompt
            self.answering.limits.check_token_ids(token_ids, "prompt")
            if fields.echo:
                echo = await asyncio.to_thread(tokenizer.decode, token_ids)
        answer = CompletionFormat(
            description.model_name,
            TokenTexts(tokenizer),
            logprobs=fields.logprobs is not None,
            echo=echo,
        )
        return Asked(call, token_ids, answer, DEFAULT_MAX_TOKENS, "prompt")
