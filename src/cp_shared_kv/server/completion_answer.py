"""Answers in the format of OpenAI's completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cp_shared_kv.server.answer_format import AnswerHead, ShownUsage
from cp_shared_kv.server.choice_text import Piece
from cp_shared_kv.server.completion_schema import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from cp_shared_kv.server.openai_schema import Usage
from cp_shared_kv.server.token_text import TokenTexts


class CompletionFormat:
    """One answer of /v1/completions. `echo` is the prompt's text where it is to be repeated."""

    def __init__(self, model: str, texts: TokenTexts, *, logprobs: bool, echo: str = "") -> None:
        self._head = AnswerHead.new("cmpl", model)
        self._texts = texts
        self._logprobs = logprobs
        self._echo = echo
        self._begun: set[int] = set()

    @property
    def id(self) -> str:
        """The answer's id."""
        return self._head.id

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """All of the answer."""
        shown = [
            self._choice(index, choice, self._echo + choice.text)
            for index, choice in enumerate(choices)
        ]
        return self._completion(shown, usage)

    def events(self, index: int, piece: Piece, usage: ShownUsage) -> Iterator[bytes]:
        """One chunk for a piece that shows anything."""
        text = piece.text
        if index not in self._begun:
            self._begun.add(index)
            text = self._echo + text
        if text or piece:
            yield self._completion([self._choice(index, piece, text)], usage)

    def usage_events(self, usage: Usage) -> Iterator[bytes]:
        """A chunk without choices."""
        yield self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: ShownUsage) -> bytes:
        head = self._head
        return msgspec.json.encode(
            Completion(
                id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
            )
        )

    def _choice(self, index: int, piece: Piece, text: str) -> CompletionChoice:
        logprobs = self._completion_logprobs(piece) if self._logprobs else None
        return CompletionChoice(text, piece.finish_reason, index, logprobs)

    def _completion_logprobs(self, piece: Piece) -> CompletionLogprobs:
        name = self._texts.unique_text
        shown = CompletionLogprobs([], [], [], [])
        for token in piece.tokens:
            told = token.logprobs
            likely = {name(token_id): logprob for token_id, logprob in told.top}
            shown.tokens.append(name(told.token_id))
            shown.token_logprobs.append(told.logprob)
            shown.top_logprobs.append(likely | {name(told.token_id): told.logprob})
            shown.text_offset.append(token.text_offset)
        return shown
