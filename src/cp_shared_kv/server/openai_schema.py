"""The shapes of OpenAI's completions API, as far as this server speaks it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from cp_shared_kv.engine.api import FinishReason

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """`continuous_usage_stats` is vLLM's: usage in every chunk, not in the last alone."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionBody(msgspec.Struct, kw_only=True):
    """POST /v1/completions. A field that is null counts as absent.

    Decoding is greedy: without `temperature` it is 0, where OpenAI's own default is 1. `prompt` is
    a string or a list of token ids, or a list with one of these; several prompts in one request
    are refused. The second group of fields is known to clients but can hold its neutral value
    only (`completion_request.NEUTRAL_VALUES`).
    """

    model: str
    prompt: str | list[str | Int64 | list[Int64]]
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    seed: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    n: Int64 | None = None
    best_of: Int64 | None = None
    echo: bool | None = None
    logprobs: Int64 | None = None
    suffix: str | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    min_tokens: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


class PromptTokensDetails(msgspec.Struct):
    """Part of `Usage`."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        """Usage with its sum."""
        return cls(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens),
        )


class CompletionChoice(msgspec.Struct):
    """The text of an answer, or the next piece of it."""

    text: str
    finish_reason: FinishReason | None
    index: int = 0
    logprobs: None = None


class Completion(msgspec.Struct, kw_only=True):
    """An answer, or one chunk of a streamed one. In streams `usage` may be null or left out."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Model(msgspec.Struct, kw_only=True):
    """One served model. `max_model_len` is vLLM's and SGLang's addition: the context length."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "cp-shared-kv"


class ModelList(msgspec.Struct):
    """GET /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"
