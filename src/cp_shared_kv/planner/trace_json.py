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
from cp_shared_kv.planner.trace import Request, Trace, TraceBuilder

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


def read_agentic(path: Path) -> Trace:
    """Agentic conversations. TraceError names the first line that is wrong, and how."""
    decoder = msgspec.json.Decoder(AgenticLine)
    builder, block_tokens = TraceBuilder(), 0
    for number, conversation in _lines(path, decoder):
        block_tokens = block_tokens or conversation.block_size
        if conversation.block_size != block_tokens:
            raise TraceError(
                f"{path.name}, line {number}: block_size differs from the lines before",
                value=conversation.block_size,
                allowed=str(block_tokens),
            )
        builder.begin_conversation()
        for place, request in enumerate(conversation.reqs):
            blocks = sum(count for _, count in request.block_runs)
            where = f"{path.name}, line {number}, reqs[{place}]"
            _check_blocks(where, blocks, request.prompt_tokens, block_tokens)
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


def read_mooncake(path: Path) -> Trace:
    """Mooncake's format. TraceError names the first line that is wrong, and how."""
    decoder = msgspec.json.Decoder(MooncakeLine)
    builder, before = TraceBuilder(), 0.0
    for number, request in _lines(path, decoder):
        if request.timestamp < before:
            raise TraceError(
                f"{path.name}, line {number}: timestamp goes back",
                value=request.timestamp,
                allowed=f"{before:g} or more, as on the line before",
                change="sort the file by timestamp",
            )
        before = request.timestamp
        _check_blocks(
            f"{path.name}, line {number}",
            len(request.hash_ids),
            request.input_length,
            MOONCAKE_BLOCK_TOKENS,
        )
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


def _lines(path: Path, decoder: msgspec.json.Decoder[_Line]) -> Iterator[tuple[int, _Line]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path.name}, line {number}", value=error) from error


def _check_blocks(where: str, blocks: int, prompt_tokens: int, block_tokens: int) -> None:
    least, most = prompt_tokens // block_tokens, -(-prompt_tokens // block_tokens)
    if not least <= blocks <= most:
        raise TraceError(
            f"{where}: block ids do not cover the prompt",
            value=f"{blocks} blocks for {prompt_tokens} tokens",
            allowed=f"{least} to {most} blocks of {block_tokens}",
        )
