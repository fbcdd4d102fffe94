"""Traces of one JSON object a line: agentic conversations, and Mooncake's requests.

Agentic: {"block_size": 64, "reqs": [[seconds, prompt tokens, output tokens, [[first block id,
blocks], ...], is_subagent, answer seconds, think seconds], ...]}, a conversation a line, times from
its start, block ids its own. Mooncake: {"timestamp": milliseconds, "input_length",
"output_length", "hash_ids": [...]}, a request a line, ids of 512-token blocks for the whole file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from cp_shared_kv.errors import TraceError
from cp_shared_kv.planner.trace import Refuse, Request, Trace, TraceBuilder, stop_at_first

MOONCAKE_BLOCK_TOKENS = 512
MAX_BLOCK_ID = 2**31 - 1

_Line = TypeVar("_Line")
_Seconds = Annotated[float, Meta(ge=0)]
_Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_PromptTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Id = Annotated[int, Meta(ge=0, le=MAX_BLOCK_ID)]
_Count = Annotated[int, Meta(ge=1, le=MAX_BLOCK_ID)]


class AgenticRequest(msgspec.Struct, array_like=True, frozen=True):
    """One request of a conversation."""

    at_seconds: _Seconds
    prompt_tokens: _PromptTokens
    output_tokens: _Tokens
    block_runs: list[tuple[_Id, _Count]]
    is_subagent: int | bool = 0
    answer_seconds: _Seconds | None = None
    think_seconds: _Seconds | None = None


class AgenticLine(msgspec.Struct, frozen=True):
    """One conversation."""

    block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    reqs: Annotated[list[AgenticRequest], Meta(min_length=1)]


class MooncakeLine(msgspec.Struct, frozen=True):
    """One request."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: _PromptTokens
    output_length: _Tokens
    hash_ids: list[_Id]


def read_agentic(path: Path, refuse: Refuse = stop_at_first) -> Trace:
    """Agentic conversations. `refuse` gets a TraceError for each line that is wrong."""
    decoder = msgspec.json.Decoder(AgenticLine)
    builder, block_tokens = TraceBuilder(), 0
    for number, conversation in _lines(path, decoder, refuse):
        block_tokens = block_tokens or conversation.block_size
        try:
            _check_conversation(f"{path.name}, line {number}", conversation, block_tokens)
        except TraceError as error:
            refuse(error)
            continue
        builder.begin_conversation()
        for request in conversation.reqs:
            builder.add(
                Request(
                    request.at_seconds,
                    request.prompt_tokens,
                    request.output_tokens,
                    request.block_runs,
                    request.answer_seconds,
                    request.think_seconds or 0.0,
                )
            )
    return builder.build(
        path, "agentic", block_tokens=block_tokens, local_blocks=True, absolute_times=False
    )


def read_mooncake(path: Path, refuse: Refuse = stop_at_first) -> Trace:
    """Mooncake's format. `refuse` gets a TraceError for each line that is wrong."""
    decoder = msgspec.json.Decoder(MooncakeLine)
    builder, before = TraceBuilder(), 0.0
    for number, request in _lines(path, decoder, refuse):
        try:
            _check_request(f"{path.name}, line {number}", request, before)
        except TraceError as error:
            refuse(error)
            continue
        before = request.timestamp
        builder.begin_conversation()
        builder.add(
            Request(
                request.timestamp / 1000,
                request.input_length,
                request.output_length,
                runs_of(request.hash_ids),
            )
        )
    return builder.build(path, "mooncake", block_tokens=MOONCAKE_BLOCK_TOKENS)


def runs_of(ids: list[int]) -> Iterable[tuple[int, int]]:
    """Runs of ids that follow each other, as (first, count)."""
    if not ids:
        return
    first = ids[0]
    for one, following in pairwise(ids):
        if following != one + 1:
            yield first, one + 1 - first
            first = following
    yield first, ids[-1] + 1 - first


def _lines(
    path: Path, decoder: msgspec.json.Decoder[_Line], refuse: Refuse
) -> Iterator[tuple[int, _Line]]:
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
            except (msgspec.DecodeError, RecursionError) as error:
                refuse(TraceError(f"{path.name}, line {number}", value=error))
                continue
            yield number, line


def _check_conversation(where: str, conversation: AgenticLine, block_tokens: int) -> None:
    if conversation.block_size != block_tokens:
        raise TraceError(
            f"{where}: block_size differs from the lines before",
            value=conversation.block_size,
            allowed=str(block_tokens),
        )
    for place, request in enumerate(conversation.reqs):
        blocks = sum(count for _, count in request.block_runs)
        _check_blocks(f"{where}, reqs[{place}]", blocks, request.prompt_tokens, block_tokens)


def _check_request(where: str, request: MooncakeLine, before: float) -> None:
    if request.timestamp < before:
        raise TraceError(
            f"{where}: timestamp goes back",
            value=request.timestamp,
            allowed=f"{before:g} or more, as on the line before",
            change="sort the file by timestamp",
        )
    _check_blocks(where, len(request.hash_ids), request.input_length, MOONCAKE_BLOCK_TOKENS)


def _check_blocks(where: str, blocks: int, prompt_tokens: int, block_tokens: int) -> None:
    least, most = prompt_tokens // block_tokens, -(-prompt_tokens // block_tokens)
    if not least <= blocks <= most:
        raise TraceError(
            f"{where}: block ids do not cover the prompt",
            value=f"{blocks} blocks for {prompt_tokens} tokens",
            allowed=f"{least} to {most} blocks of {block_tokens}",
        )
