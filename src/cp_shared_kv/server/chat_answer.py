"""Answers in the format of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cp_shared_kv.server.answer_format import AnswerHead, ShownUsage
from cp_shared_kv.server.chat_schema import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChosenToken,
    ChunkChoice,
    Delta,
    LikelyToken,
)
from cp_shared_kv.server.choice_text import Piece
from cp_shared_kv.server.openai_schema import Usage
from cp_shared_kv.server.token_text import TokenTexts


class ChatFormat:
    """One answer of /v1/chat/completions."""

    def __init__(self, model: str, texts: TokenTexts, *, logprobs: bool) -> None:
        self._head = AnswerHead.new("chatcmpl", model)
        self._texts = texts
        self._logprobs = logprobs
        self._begun: set[int] = set()

    @property
    def id(self) -> str:
        """The answer's id."""
        return self._head.id

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """All of the answer."""
        head = self._head
        shown: list[ChatChoice] = []
        for index, choice in enumerate(choices):
            assert choice.finish_reason is not None
            shown.append(
                ChatChoice(
                    index=index,
                    message=AnswerMessage(choice.text),
                    logprobs=self._chat_logprobs(choice),
                    finish_reason=choice.finish_reason,
                )
            )
        return msgspec.json.encode(
            ChatCompletion(
                id=head.id, created=head.created, model=head.model, choices=shown, usage=usage
            )
        )

    def events(self, index: int, piece: Piece, usage: ShownUsage) -> Iterator[bytes]:
        """The role before a choice's first text, its text, and its end in a chunk of its own."""
        if index not in self._begun:
            self._begun.add(index)
            role = Delta(role="assistant", content="")
            yield self._chunk([ChunkChoice(index=index, delta=role)], usage)
        if piece.text or piece.tokens:
            text = Delta(content=piece.text)
            logprobs = self._chat_logprobs(piece)
            yield self._chunk([ChunkChoice(index=index, delta=text, logprobs=logprobs)], usage)
        if piece.finish_reason is not None:
            end = ChunkChoice(index=index, delta=Delta(), finish_reason=piece.finish_reason)
            yield self._chunk([end], usage)

    def usage_events(self, usage: Usage) -> Iterator[bytes]:
        """A chunk without choices."""
        yield self._chunk([], usage)

    def _chunk(self, choices: list[ChunkChoice], usage: ShownUsage) -> bytes:
        head = self._head
        return msgspec.json.encode(
            ChatChunk(
                id=head.id, created=head.created, model=head.model, choices=choices, usage=usage
            )
        )

    def _chat_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        chosen: list[ChosenToken] = []
        for token in piece.tokens:
            told = token.logprobs
            top = [self._likely(token_id, logprob) for token_id, logprob in told.top]
            own = self._likely(told.token_id, told.logprob)
            chosen.append(ChosenToken(own.token, own.logprob, own.bytes, top))
        return ChatLogprobs(chosen)

    def _likely(self, token_id: int, logprob: float) -> LikelyToken:
        utf8 = self._texts.utf8(token_id)
        return LikelyToken(
            self._texts.text(token_id), logprob, None if utf8 is None else list(utf8)
        )
