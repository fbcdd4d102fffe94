"""From the fields of a POST /v1/chat/completions to plain messages, or a 400 that names why not."""

from __future__ import annotations

from collections.abc import Mapping

from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.chat_schema import ChatBody, ChatMessage
from cp_shared_kv.server.generation_call import (
    GenerationCall,
    check_bounds,
    check_neutral,
    checked_call,
)
from cp_shared_kv.server.generation_defaults import GenerationDefaults
from cp_shared_kv.server.json_body import echoed

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The roles that are taken, and what templates call them: hardly any knows developer."""


def checked_chat(fields: ChatBody, defaults: GenerationDefaults, vocab_size: int) -> GenerationCall:
    """Check what is the chat API's own, then what both share. Raises `ApiError` (400)."""
    check_bounds("top_logprobs", fields.top_logprobs)
    if fields.top_logprobs and not fields.logprobs:
        raise ApiError(
            400, "top_logprobs is allowed only beside logprobs: true", param="top_logprobs"
        )
    no_tools = "this server calls no tools"
    check_neutral(
        fields,
        {
            "tools": ([], f"null or an empty list; {no_tools}"),
            "tool_choice": ("none", f"null or 'none'; {no_tools}"),
            "functions": ([], f"null or an empty list; {no_tools}"),
            "function_call": ("none", f"null or 'none'; {no_tools}"),
            "response_format": ({"type": "text"}, "null or {'type': 'text'}"),
            "modalities": (["text"], "null or ['text']"),
        },
    )
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    return checked_call(fields, defaults, vocab_size=vocab_size, logprobs=logprobs)


def plain_messages(messages: list[ChatMessage]) -> list[Mapping[str, str]]:
    """Messages as templates take them: role, content as one string, name if there is one.

    Raises `ApiError` (400).
    """
    if not messages:
        raise _refusal("messages is empty; allowed: at least one message")
    return [_plain_message(at, message) for at, message in enumerate(messages)]


def _plain_message(at: int, message: ChatMessage) -> Mapping[str, str]:
    if message.role not in ROLES:
        allowed = ", ".join(ROLES)
        raise _refusal(f"messages[{at}].role is {echoed(message.role)}; allowed: {allowed}")
    if message.tool_calls:
        raise _refusal(f"messages[{at}].tool_calls is not supported; allowed: null, or empty")
    plain = {"role": ROLES[message.role], "content": _text(at, message)}
    return plain if message.name is None else plain | {"name": message.name}


def _text(at: int, message: ChatMessage) -> str:
    content = message.content
    if content is None:
        raise _refusal(f"messages[{at}].content is null; allowed: a string, or a list of text")
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise _refusal(
                f"messages[{at}].content[{place}] has type {echoed(part.type)}"
                f"{' without text' if part.type == 'text' else ''}; allowed: type 'text' with text"
            )
        texts.append(part.text)
    return "\n".join(texts)


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, param="messages")
