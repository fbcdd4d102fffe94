"""The shapes that OpenAI's two completion APIs share, as far as this server speaks them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

ShownFinishReason = Literal["stop", "length", "abort"]
"""stop: an end-of-sequence token, one of stop_token_ids or a stop string; length: max_tokens;
abort: POST /abort_request, as in SGLang and vLLM."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """`continuous_usage_stats` is vLLM's: usage in every chunk, not in the last alone."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What a client may say about the output, in either API. A field that is null counts as absent.

    Absent sampling fields take what the checkpoint's generation_config.json says, then OpenAI's
    defaults: temperature 1, everything else off. `top_k`, `min_p`, `repetition_penalty`,
    `stop_token_ids`, `min_tokens` and `ignore_eos` are the additions that vLLM and SGLang made;
    `timeout` (seconds) is this server's. `rid` (SGLang's name) or `request_id` (vLLM's) names the
    request for /abort_request. Bounds are in `generation_call`.
    """

    model: str
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    n: Int64 | None = None
    seed: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = None
    rid: str | None = None
    request_id: str | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


class PromptTokensDetails(msgspec.Struct):
    """Part of `Usage`."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one request: its prompt once, and the output of all its choices."""

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
