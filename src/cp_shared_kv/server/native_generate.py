"""POST /generate: SGLang's own API, beside OpenAI's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from cp_shared_kv.server.answering import Answering, Asked
from cp_shared_kv.server.generation_defaults import GenerationDefaults
from cp_shared_kv.server.json_body import decode_body
from cp_shared_kv.server.native_answer import NativeFormat, NativeTold
from cp_shared_kv.server.native_request import checked_native, one_native_prompt
from cp_shared_kv.server.native_schema import NativeBody
from cp_shared_kv.server.token_text import TokenTexts

DEFAULT_MAX_NEW_TOKENS = 128
"""Output tokens when a request does not say, as in SGLang."""


@dataclass(frozen=True)
class NativeGenerate:
    """The endpoint and what it needs."""

    answering: Answering
    defaults: GenerationDefaults

    async def create(self, request: Request) -> Response:
        """Answer one request; `NativeBody` says what it may hold."""
        return await self.answering.respond(request, self._understand)

    async def _understand(self, body: bytes) -> Asked:
        tokenizer, description = self.answering.tokenizer, self.answering.description
        fields = decode_body(body, NativeBody)
        call = checked_native(
            fields,
            self.defaults,
            model_name=description.model_name,
            vocab_size=description.vocab_size,
        )
        param, prompt = one_native_prompt(fields)
        if isinstance(prompt, str):
            # Off the event loop: a prompt of a million tokens takes about a second.
            prompt = await asyncio.to_thread(tokenizer.encode, prompt)
        told = NativeTold(
            rid=fields.rid,
            choices=call.choices,
            logprobs=bool(fields.return_logprob),
            alternatives=bool(fields.top_logprobs_num),
            token_text=TokenTexts(tokenizer).text if fields.return_text_in_logprobs else None,
        )
        return Asked(
            call, prompt, NativeFormat(told), DEFAULT_MAX_NEW_TOKENS, param, "min_new_tokens"
        )
