"""The bytes of a request as a struct, or a 400 that names the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from cp_shared_kv.server.api_error import ApiError

T = TypeVar("T", bound=msgspec.Struct)

IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that clients send and that cannot change the answer: accepted and not read."""

_AT_FIELD = re.compile(r" - at `\$\.([a-z_.]+).*`$")
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")
_ECHO_CHARACTERS = 100


def decode_body(body: bytes, schema: type[T]) -> T:
    """The body by its schema. Fields that neither it nor `IGNORED_FIELDS` has are refused unless
    they are null. Raises `ApiError` 400."""
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        fields = msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {reason}") from None
    for name in given.keys() - set(schema.__struct_fields__) - IGNORED_FIELDS:
        if bytes(given[name]) != b"null":
            raise ApiError(
                400,
                f"unknown parameter {echoed(name)}; it could change the answer, so it is not "
                "passed over in silence",
                param=name[:_ECHO_CHARACTERS],
                code="unknown_parameter",
            )
    return fields


def echoed(value: object) -> str:
    """A value of the client's as an error message may repeat it."""
    text = repr(value)
    return text if len(text) <= _ECHO_CHARACTERS else text[:_ECHO_CHARACTERS] + "..."


def _wrong_type(reason: str) -> ApiError:
    if missing := _MISSING_FIELD.search(reason):
        return ApiError(400, f"{missing[1]} is missing", param=missing[1])
    if at := _AT_FIELD.search(reason):
        return ApiError(400, f"{at[1]}: {reason[: at.start()]}", param=at[1])
    return ApiError(400, f"the body is not as it should be: {reason}")
