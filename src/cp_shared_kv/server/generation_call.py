"""What a request asks of the engine: its fields checked, and open ones filled in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cp_shared_kv.engine.api import Sampling
from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.generation_defaults import GenerationDefaults
from cp_shared_kv.server.json_body import echoed
from cp_shared_kv.server.openai_schema import GenerationFields, StreamOptions
from cp_shared_kv.server.sampling_bounds import out_of_bounds
from cp_shared_kv.transfer.sampling_params import MAX_LOGIT_BIAS_TOKENS, MAX_STOP_TOKEN_IDS

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
"""Of one stop string; so much output may have to be held back."""

MAX_NAME_CHARACTERS = 256

_BOUNDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "timeout",
)


@dataclass(frozen=True, kw_only=True)
class GenerationCall:
    """A checked request, apart from its prompt. `max_tokens` is None where it was left open."""

    sampling: Sampling
    choices: int
    stop: tuple[str, ...]
    max_tokens: int | None
    timeout_seconds: float | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    names: tuple[str, ...]
    """By which the client may end it."""

    def sampling_of(self, index: int) -> Sampling:
        """The sampling of one choice. The first has the request's own seed, so that it is the
        answer that n = 1 would have given; the others' are drawn from it."""
        seed = self.sampling.seed
        if seed is None or index == 0:
            return self.sampling
        digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
        return replace(self.sampling, seed=int.from_bytes(digest) >> 1)


def checked_call(
    fields: GenerationFields,
    defaults: GenerationDefaults,
    *,
    vocab_size: int,
    logprobs: int | None,
) -> GenerationCall:
    """Check everything that can be checked without the prompt. Raises `ApiError` (400)."""
    for name in _BOUNDED:
        check_bounds(name, getattr(fields, name))
    max_name, max_tokens = _max_tokens(fields)
    check_output_tokens(("min_tokens", fields.min_tokens), (max_name, max_tokens))
    check_neutral(
        fields,
        {
            "skip_special_tokens": (True, "true"),
            "spaces_between_special_tokens": (True, "true"),
        },
    )
    stream = bool(fields.stream)
    if fields.stream_options is not None and not stream:
        raise ApiError(
            400, "stream_options is allowed only beside stream: true", param="stream_options"
        )
    options = fields.stream_options or StreamOptions()
    return GenerationCall(
        sampling=_sampling(fields, defaults, vocab_size, logprobs),
        choices=1 if fields.n is None else fields.n,
        stop=_stop_strings(fields.stop),
        max_tokens=max_tokens,
        timeout_seconds=fields.timeout,
        stream=stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        names=_names(fields),
    )


def check_model(asked: str, served: str) -> None:
    """Refuse (404) a model that this server does not have."""
    if asked != served:
        raise ApiError(
            404,
            f"the model {echoed(asked)} does not exist; this server has {served!r}",
            param="model",
            code="model_not_found",
        )


def check_bounds(name: str, value: float | None) -> None:
    """Refuse (400) a number out of its bounds; None is in them."""
    allowed = None if value is None else out_of_bounds(name, value)
    if allowed is not None:
        raise ApiError(400, f"{name} is {value}; allowed: {allowed}", param=name)


def check_output_tokens(least: tuple[str, int | None], most: tuple[str, int | None]) -> None:
    """Refuse (400) a least number of output tokens that is out of bounds or above the most, and a
    most below 1. Each comes with the name of its field; None is not given."""
    (min_name, min_tokens), (max_name, max_tokens) = least, most
    if min_tokens is not None and (allowed := out_of_bounds("min_tokens", min_tokens)):
        raise ApiError(400, f"{min_name} is {min_tokens}; allowed: {allowed}", param=min_name)
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(400, f"{max_name} is {max_tokens}; allowed: 1 or more", param=max_name)
    if min_tokens and max_tokens is not None and min_tokens > max_tokens:
        raise ApiError(
            400,
            f"{min_name} is {min_tokens}; allowed: at most {max_name}, which is {max_tokens}",
            param=min_name,
        )


def check_neutral(fields: object, neutral: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse (400) parameters that are known but not built, unless null or at the value that
    changes nothing; `neutral` has that value and its description."""
    for name, (value, allowed) in neutral.items():
        given = getattr(fields, name)
        if given is not None and given != value:
            raise ApiError(
                400,
                f"{name} is not supported with this value; allowed: {allowed}",
                param=name,
                code="unsupported_value",
            )


def _sampling(
    fields: GenerationFields,
    defaults: GenerationDefaults,
    vocab_size: int,
    logprobs: int | None,
) -> Sampling:
    top_k = defaults.top_k if fields.top_k is None else fields.top_k
    return Sampling(
        temperature=_or(fields.temperature, defaults.temperature),
        top_p=_or(fields.top_p, defaults.top_p),
        top_k=max(0, top_k),
        min_p=_or(fields.min_p, defaults.min_p),
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        logit_bias=_logit_bias(fields.logit_bias or {}, vocab_size),
        seed=fields.seed,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids or [], vocab_size),
        min_tokens=fields.min_tokens or 0,
        logprobs=logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    _check_count("logit_bias", len(given), MAX_LOGIT_BIAS_TOKENS)
    bias: dict[int, float] = {}
    for name, value in given.items():
        token_id = int(name) if name.isascii() and name.isdecimal() and len(name) < 20 else -1
        if not 0 <= token_id < vocab_size:
            raise ApiError(
                400,
                f"logit_bias has the key {echoed(name)}; allowed: token ids 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        check_bounds("logit_bias", value)
        bias[token_id] = value
    if len(bias) < len(given):
        raise ApiError(400, "logit_bias names a token twice", param="logit_bias")
    return bias


def _names(fields: GenerationFields) -> tuple[str, ...]:
    given = {"rid": fields.rid, "request_id": fields.request_id}
    names = {field: name for field, name in given.items() if name is not None}
    for field, name in names.items():
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise ApiError(
                400,
                f"{field} has {len(name)} characters; allowed: 1 to {MAX_NAME_CHARACTERS}",
                param=field,
            )
    return tuple(names.values())


def _stop_token_ids(given: list[int], vocab_size: int) -> tuple[int, ...]:
    _check_count("stop_token_ids", len(given), MAX_STOP_TOKEN_IDS)
    for token_id in given:
        if not 0 <= token_id < vocab_size:
            raise ApiError(
                400,
                f"stop_token_ids has {token_id}; allowed: 0 to {vocab_size - 1}",
                param="stop_token_ids",
            )
    return tuple(given)


def _stop_strings(given: str | list[str] | None) -> tuple[str, ...]:
    strings = [given] if isinstance(given, str) else given or []
    _check_count("stop", len(strings), MAX_STOP_STRINGS)
    for string in strings:
        if not 0 < len(string) <= MAX_STOP_CHARACTERS:
            raise ApiError(
                400,
                f"stop has a string of {len(string)} characters; allowed: 1 to "
                f"{MAX_STOP_CHARACTERS}",
                param="stop",
            )
    return tuple(strings)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise ApiError(400, f"{name} has {count} entries; allowed: up to {most}", param=name)


def _max_tokens(fields: GenerationFields) -> tuple[str, int | None]:
    """By which of its names it was given, and how many."""
    given = {"max_tokens": fields.max_tokens, "max_completion_tokens": fields.max_completion_tokens}
    named = {name: value for name, value in given.items() if value is not None}
    if len(set(named.values())) > 1:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens differ; send one of them",
            param="max_completion_tokens",
        )
    return next(iter(named.items()), ("max_tokens", None))
