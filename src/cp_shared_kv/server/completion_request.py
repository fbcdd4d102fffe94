"""From the bytes of a POST /v1/completions to a checked call, or a 4xx that names the field."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.openai_schema import CompletionBody, StreamOptions

IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that clients send and that cannot change the answer: accepted and not read."""

NEUTRAL_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "temperature": ((0,), "0 (greedy decoding)"),
    "top_p": ((1,), "1"),
    "top_k": ((-1, 0, 1), "-1 or 0 (off), or 1"),
    "min_p": ((0,), "0"),
    "n": ((1,), "1"),
    "best_of": ((1,), "1"),
    "echo": ((False,), "false"),
    "logprobs": ((), "null"),
    "suffix": (("",), "null or an empty string"),
    "stop": (([],), "null or an empty list"),
    "stop_token_ids": (([],), "null or an empty list"),
    "min_tokens": ((0,), "0, or any number beside ignore_eos"),
    "presence_penalty": ((0,), "0"),
    "frequency_penalty": ((0,), "0"),
    "repetition_penalty": ((1,), "1"),
    "logit_bias": (({},), "null or an empty object"),
    "add_special_tokens": ((True,), "true"),
    "skip_special_tokens": ((True,), "true"),
    "spaces_between_special_tokens": ((True,), "true"),
}
"""For each parameter that is known but not built: the values that change nothing, and their
description for the one who sent another."""

_KNOWN_FIELDS = frozenset(CompletionBody.__struct_fields__)
_AT_FIELD = re.compile(r" - at `\$\.([a-z_.]+).*`$")
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")
_ECHO_CHARACTERS = 100


@dataclass(frozen=True)
class CompletionCall:
    """What a checked request asks for. `max_tokens` is None where the client left it open."""

    prompt: str | list[int]
    max_tokens: int | None
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool


def parse_completion(body: bytes, model_name: str) -> CompletionCall:
    """Check everything that can be checked without the tokenizer. Raises `ApiError` (4xx)."""
    fields = _decode(body)
    if fields.model != model_name:
        raise ApiError(
            404,
            f"the model {_echo(fields.model)} does not exist; this server has {model_name!r}",
            param="model",
            code="model_not_found",
        )
    _check_neutral(fields)
    stream = bool(fields.stream)
    if fields.stream_options is not None and not stream:
        raise ApiError(
            400, "stream_options is allowed only beside stream: true", param="stream_options"
        )
    options = fields.stream_options or StreamOptions()
    return CompletionCall(
        prompt=_one_prompt(fields.prompt),
        max_tokens=_max_tokens(fields),
        ignore_eos=bool(fields.ignore_eos),
        stream=stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
    )


def _decode(body: bytes) -> CompletionBody:
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        fields = msgspec.json.decode(body, type=CompletionBody)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {reason}") from None
    for name in given.keys() - _KNOWN_FIELDS - IGNORED_FIELDS:
        if bytes(given[name]) != b"null":
            raise ApiError(
                400,
                f"unknown parameter {_echo(name)}; it could change the answer, so it is not "
                "passed over in silence",
                param=name[:_ECHO_CHARACTERS],
                code="unknown_parameter",
            )
    return fields


def _wrong_type(reason: str) -> ApiError:
    if missing := _MISSING_FIELD.search(reason):
        return ApiError(400, f"{missing[1]} is missing", param=missing[1])
    if at := _AT_FIELD.search(reason):
        return ApiError(400, f"{at[1]}: {reason[: at.start()]}", param=at[1])
    return ApiError(400, f"the body is not as it should be: {reason}")


def _check_neutral(fields: CompletionBody) -> None:
    for name, (neutral, allowed) in NEUTRAL_VALUES.items():
        value = getattr(fields, name)
        if value is None or value in neutral or (name == "min_tokens" and fields.ignore_eos):
            continue
        raise ApiError(
            400,
            f"{name} is not supported with this value; allowed: {allowed}",
            param=name,
            code="unsupported_value",
        )


def _max_tokens(fields: CompletionBody) -> int | None:
    given = {"max_tokens": fields.max_tokens, "max_completion_tokens": fields.max_completion_tokens}
    named = {name: value for name, value in given.items() if value is not None}
    for name, value in named.items():
        if value < 1:
            raise ApiError(400, f"{name} is {value}; allowed: 1 or more", param=name)
    if len(set(named.values())) > 1:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens differ; send one of them",
            param="max_completion_tokens",
        )
    return next(iter(named.values()), None)


def _one_prompt(given: str | list[str | int | list[int]]) -> str | list[int]:
    prompt = given
    if isinstance(given, list) and given and not isinstance(given[0], int):
        if len(given) > 1:
            raise ApiError(
                400,
                f"prompt holds {len(given)} prompts; allowed: one in a request. Send a request "
                "for each",
                param="prompt",
            )
        prompt = given[0]
    if not prompt:
        raise ApiError(400, "prompt is empty; allowed: at least one token", param="prompt")
    if isinstance(prompt, str):
        return prompt
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) != len(prompt):
        raise ApiError(
            400,
            "prompt mixes token ids with other values; allowed: a string, or a list of token ids",
            param="prompt",
        )
    return token_ids


def _echo(text: str) -> str:
    return repr(text if len(text) <= _ECHO_CHARACTERS else text[:_ECHO_CHARACTERS] + "...")
