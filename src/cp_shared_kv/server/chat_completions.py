"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from cp_shared_kv.server.answering import Answering, Asked
from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.chat_answer import ChatFormat
from cp_shared_kv.server.chat_request import checked_chat, plain_messages
from cp_shared_kv.server.chat_schema import ChatBody
from cp_shared_kv.server.chat_template import ChatTemplate, ChatTemplateError
from cp_shared_kv.server.generation_call import check_model
from cp_shared_kv.server.generation_defaults import GenerationDefaults
from cp_shared_kv.server.json_body import decode_body
from cp_shared_kv.server.token_text import TokenTexts

DEFAULT_MAX_TOKENS = 1024
"""Output tokens when a chat does not say. OpenAI has no such limit, but decode sets pages aside
for all that a request may generate: one open chat would hold what serves many."""


@dataclass(frozen=True)
class ChatCompletions:
    """The endpoint and what it needs; without a template it refuses everything."""

    answering: Answering
    defaults: GenerationDefaults
    template: ChatTemplate | None

    async def create(self, request: Request) -> Response:
        """Answer one request; `ChatBody` says what it may hold."""
        return await self.answering.respond(request, self._understand)

    async def _understand(self, body: bytes) -> Asked:
        tokenizer, description = self.answering.tokenizer, self.answering.description
        fields = decode_body(body, ChatBody)
        check_model(fields.model, description.model_name)
        if self.template is None:
            raise ApiError(
                400,
                "this checkpoint has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); use /v1/completions, or add one",
                code="no_chat_template",
            )
        call = checked_chat(fields, self.defaults, description.vocab_size)
        # Off the event loop: a long chat takes as long as a long prompt.
        token_ids = await asyncio.to_thread(self._tokenize, self.template, fields)
        answer = ChatFormat(
            description.model_name, TokenTexts(tokenizer), logprobs=bool(fields.logprobs)
        )
        return Asked(call, token_ids, answer, DEFAULT_MAX_TOKENS, "messages")

    def _tokenize(self, template: ChatTemplate, fields: ChatBody) -> list[int]:
        extra = fields.chat_template_kwargs or {}
        for name in sorted(template.reserved & extra.keys()):
            raise ApiError(
                400,
                f"chat_template_kwargs has {name}; allowed: names that the server does not give "
                "itself",
                param="chat_template_kwargs",
            )
        try:
            text = template.render(
                plain_messages(fields.messages),
                add_generation_prompt=fields.add_generation_prompt is not False,
                extra=extra,
            )
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from None
        return self.answering.tokenizer.encode_as_written(text)
