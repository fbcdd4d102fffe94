"""The shapes of POST /v1/completions."""

from __future__ import annotations

from typing import Literal

import msgspec

from cp_shared_kv.server.openai_schema import GenerationFields, Int64, ShownFinishReason, Usage


class CompletionBody(GenerationFields, kw_only=True):
    """POST /v1/completions.

    `prompt` is a string or a list of token ids, or a list with one of these; several prompts in
    one request are refused. `logprobs` says how many alternatives to tell with each token; `echo`
    puts the prompt in front of the text, and is refused beside `logprobs`.
    """

    prompt: str | list[str | Int64 | list[Int64]]
    echo: bool | None = None
    logprobs: Int64 | None = None
    best_of: Int64 | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists over the tokens of a text. `text_offset` counts characters of the whole text.

    `top_logprobs` has the token itself, too. A token that is no whole character is written
    `bytes:\\xe2\\x82`, as OpenAI does. All is null where no log-probabilities were asked for.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """The text of an answer, or the next piece of it."""

    text: str
    finish_reason: ShownFinishReason | None
    index: int = 0
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct, kw_only=True):
    """An answer, or one chunk of a streamed one. In streams `usage` may be null or left out."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
