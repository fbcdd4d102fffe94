"""The shapes of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cp_shared_kv.server.openai_schema import GenerationFields, Int64, ShownFinishReason, Usage


class ContentPart(msgspec.Struct, kw_only=True):
    """Part of a message. Of the types that OpenAI has, this server takes `text`."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message: role system, developer (the same), user or assistant.

    Content in parts is joined with a newline between them. What belongs to tools is refused
    unless it is null.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    annotations: list[Any] | None = None
    function_call: None = None
    tool_calls: list[Any] | None = None
    tool_call_id: None = None


class ChatBody(GenerationFields, kw_only=True):
    """POST /v1/chat/completions.

    The messages become a prompt by the checkpoint's chat template, to which
    `chat_template_kwargs` are given, too (an addition of vLLM and SGLang, as is
    `add_generation_prompt`). Without `max_tokens` there are at most 1,024 output tokens, for
    decode sets aside pages for all that a request may generate. The last group of fields can hold
    its neutral value only.
    """

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None


class LikelyToken(msgspec.Struct):
    """A token and its natural log-probability; `bytes` is null where they cannot be told."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(LikelyToken):
    """A token of the answer, with the likeliest in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a message, or of a piece of it."""

    content: list[ChosenToken]
    refusal: None = None


class AnswerMessage(msgspec.Struct):
    """The message of a whole answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a whole answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ShownFinishReason


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, kw_only=True):
    """One choice in a chunk of a streamed answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ShownFinishReason | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One chunk of a streamed answer. `usage` may be null or left out."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
