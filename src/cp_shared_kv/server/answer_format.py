"""What an API makes of the pieces of an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from cp_shared_kv.server.choice_text import Piece
from cp_shared_kv.server.openai_schema import Usage

ShownUsage = Usage | msgspec.UnsetType | None
"""In streams usage may be null or left out."""


class AnswerFormat(Protocol):
    """The JSON of one answer. All methods return whole objects."""

    @property
    def id(self) -> str:
        """The answer's id, and that of its first request in the engine."""
        ...

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """All of the answer."""
        ...

    def events(self, index: int, piece: Piece, usage: ShownUsage) -> Iterator[bytes]:
        """What a stream tells of one piece of one choice; may be nothing."""
        ...

    def usage_events(self, usage: Usage) -> Iterator[bytes]:
        """What ends a stream with usage; may be nothing."""
        ...


class AnswerHead(msgspec.Struct, frozen=True):
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> AnswerHead:
        """With a new id; `created` is in seconds since 1970."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)
