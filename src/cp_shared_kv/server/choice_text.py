"""One choice of an answer: the engine's tokens as the text and log-probabilities to show."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cp_shared_kv.engine.api import TokenChunk, TokenLogprobs
from cp_shared_kv.server.detokenizer import StreamDecoder
from cp_shared_kv.server.openai_schema import ShownFinishReason
from cp_shared_kv.server.stop_strings import StopMatcher
from cp_shared_kv.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ShownToken:
    """Log-probabilities of a token, and where in the choice's text (characters) it begins."""

    logprobs: TokenLogprobs
    text_offset: int


@dataclass(slots=True)
class Piece:
    """The next part of a choice, or all of it. Tokens are those whose text begins in it, when
    log-probabilities were asked for.

    `token_ids` and `logprobs` are the engine's own, with tokens that are not shown; `matched` is
    the token id or the stop string at which the text ended.
    """

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list[ShownToken])
    finish_reason: ShownFinishReason | None = None
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    matched: int | str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish_reason)


class ChoiceText:
    """Turns chunks of tokens into pieces, up to the end of the text.

    The token that ended the output (`ending_token_ids`) and the stop string that did are not
    shown. In the text of the first `min_tokens` tokens no stop string is looked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        ending_token_ids: Collection[int],
        min_tokens: int = 0,
    ) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(stop)
        self._ending_token_ids = ending_token_ids
        self._min_tokens = min_tokens
        self._tokens = 0
        self._decoded = 0
        self._shown = 0
        self._waiting: list[ShownToken] = []

    def take(self, chunk: TokenChunk) -> Piece:
        """The part of the text that these tokens make certain."""
        token_ids = chunk.token_ids
        ended = chunk.finish_reason == "stop" and token_ids
        ending: int | None = None
        if ended and token_ids[-1] in self._ending_token_ids:
            ending = token_ids[-1]
            token_ids = token_ids[:-1]
        piece = self._shown_of(token_ids, chunk)
        piece.token_ids += chunk.token_ids
        piece.logprobs += chunk.logprobs or ()
        if piece.finish_reason == "stop":
            piece.matched = ending if self._matcher.matched is None else self._matcher.matched
        return piece

    def _shown_of(self, token_ids: Sequence[int], chunk: TokenChunk) -> Piece:
        text: list[str] = []
        for at, token_id in enumerate(token_ids):
            if chunk.logprobs is not None:
                self._waiting.append(ShownToken(chunk.logprobs[at], self._decoded))
            self._tokens += 1
            text.append(self._match(self._decoder.push([token_id])))
            if self._matcher.matched is not None:
                return self._piece("".join(text), "stop")
        if chunk.finish_reason is None:
            return self._piece("".join(text), None)
        text.append(self._match(self._decoder.flush()))
        if self._matcher.matched is not None:
            return self._piece("".join(text), "stop")
        text.append(self._matcher.flush())
        # An abort never gets here: it is raised.
        return self._piece("".join(text), "stop" if chunk.finish_reason == "stop" else "length")

    def _match(self, text: str) -> str:
        self._decoded += len(text)
        return text if self._tokens <= self._min_tokens else self._matcher.push(text)

    def _piece(self, text: str, finish_reason: ShownFinishReason | None) -> Piece:
        self._shown += len(text)
        all_of_them = finish_reason is not None and self._matcher.matched is None
        begun = [token for token in self._waiting if all_of_them or token.text_offset < self._shown]
        self._waiting = self._waiting[len(begun) :]
        return Piece(text, begun, finish_reason)
