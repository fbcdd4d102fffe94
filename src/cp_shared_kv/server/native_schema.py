"""The shapes of POST /generate, SGLang's own API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cp_shared_kv.server.openai_schema import Int64


class NativeSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How output tokens are chosen, by SGLang's names. A field that is null counts as absent.

    Absent fields take what the checkpoint's generation_config.json says, then SGLang's defaults:
    temperature 1, at most 128 new tokens, everything else off. The last group of fields can hold
    its neutral value only. Bounds are those of /v1/completions.
    """

    max_new_tokens: Int64 | None = None
    min_new_tokens: Int64 | None = None
    n: Int64 | None = None
    sampling_seed: Int64 | None = None
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

    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    beam_width: Int64 | None = None
    stream_interval: Int64 | None = None
    stop_regex: str | list[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: dict[str, Any] | None = None


class NativeBody(msgspec.Struct, kw_only=True):
    """POST /generate.

    The prompt is `text` or `input_ids`, one of them, and one prompt in a request.
    `return_logprob` tells the log-probability of each output token, `top_logprobs_num` so many
    alternatives beside it; the prompt's own tokens have none. `timeout` (seconds) is this
    server's. The last group of fields can hold its neutral value only.
    """

    text: str | None = None
    input_ids: list[Int64] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    rid: str | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Int64 | None = None
    return_text_in_logprobs: bool | None = None
    timeout: float | None = None

    logprob_start_len: Int64 | None = None
    token_ids_logprob: list[Int64] | None = None
    return_hidden_states: bool | None = None
    return_routed_experts: bool | None = None
    lora_path: str | None = None


class NativeFinish(msgspec.Struct, omit_defaults=True):
    """Why an output ended. `matched` is the token id or the stop string that ended it (type stop),
    `length` the number of its tokens (type length)."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


NativeLogprob = tuple[float, int, str | None]
"""Natural log-probability, token id, and the token's text where it was asked for."""


class NativeMeta(msgspec.Struct, kw_only=True):
    """What there is to say about an output, up to its event in a stream.

    `id` is the request's `rid`, else the answer's own; `finish_reason` is null until the end. The
    lists of log-probabilities have an entry for each of `output_ids`.
    """

    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_token_logprobs: list[NativeLogprob] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[NativeLogprob]] | msgspec.UnsetType = msgspec.UNSET


class NativeOutput(msgspec.Struct, kw_only=True):
    """One output: its text and tokens so far, for each event of a stream has all of them.

    A request with `n` above 1 is answered by a list of these, or by events with their `index`.
    """

    text: str
    output_ids: list[int]
    meta_info: NativeMeta
    index: int | msgspec.UnsetType = msgspec.UNSET


class ModelInfo(msgspec.Struct, kw_only=True):
    """GET /model_info, as far as SGLang's clients read it."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool = True
