"""Answers in the format of SGLang's /generate."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from cp_shared_kv.server.answer_format import ShownUsage
from cp_shared_kv.server.choice_text import Piece
from cp_shared_kv.server.native_schema import (
    NativeFinish,
    NativeLogprob,
    NativeMeta,
    NativeOutput,
)
from cp_shared_kv.server.openai_schema import Usage


@dataclass(frozen=True, kw_only=True)
class NativeTold:
    """What a request wants to be told: how its outputs are named, and which log-probabilities.

    `token_text` gives a token's text, where it is to stand beside its log-probability.
    """

    rid: str | None
    choices: int
    logprobs: bool
    alternatives: bool
    token_text: Callable[[int], str] | None


@dataclass
class _Output:
    """One output so far. Log-probabilities are kept as they are shown: each event has them all."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[NativeLogprob] = field(default_factory=list[NativeLogprob])
    alternatives: list[list[NativeLogprob]] = field(default_factory=list[list[NativeLogprob]])


class NativeFormat:
    """One answer of /generate. Every event has all of its output so far, as SGLang's have."""

    def __init__(self, told: NativeTold) -> None:
        self._told = told
        self._id = uuid.uuid4().hex
        self._outputs = [_Output() for _ in range(told.choices)]

    @property
    def id(self) -> str:
        """The answer's id, which meta_info shows where the request has no `rid`."""
        return self._id

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The output, or a list of them where several were asked for."""
        outputs = [self._grown(index, choice, usage) for index, choice in enumerate(choices)]
        return msgspec.json.encode(outputs[0] if self._told.choices == 1 else outputs)

    def events(self, index: int, piece: Piece, usage: ShownUsage) -> Iterator[bytes]:
        """One event for each piece, whether it has text or not: its tokens count."""
        assert isinstance(usage, Usage)
        yield msgspec.json.encode(self._grown(index, piece, usage))

    def usage_events(self, usage: Usage) -> Iterator[bytes]:  # noqa: ARG002 (AnswerFormat's)
        """None: every event has the counts up to it."""
        return iter(())

    def _grown(self, index: int, piece: Piece, usage: Usage) -> NativeOutput:
        told, output = self._told, self._outputs[index]
        output.text += piece.text
        output.token_ids += piece.token_ids
        output.logprobs += [self._shown(at.token_id, at.logprob) for at in piece.logprobs]
        meta = NativeMeta(
            id=told.rid or self._id,
            finish_reason=_finish(piece, len(output.token_ids)),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=len(output.token_ids),
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
        )
        if told.logprobs:
            meta.output_token_logprobs = output.logprobs
        if told.alternatives:
            output.alternatives += [
                [self._shown(*likely) for likely in at.top] for at in piece.logprobs
            ]
            meta.output_top_logprobs = output.alternatives
        shown = NativeOutput(text=output.text, output_ids=output.token_ids, meta_info=meta)
        if told.choices > 1:
            shown.index = index
        return shown

    def _shown(self, token_id: int, logprob: float) -> NativeLogprob:
        text = self._told.token_text
        return logprob, token_id, None if text is None else text(token_id)


def _finish(piece: Piece, tokens: int) -> NativeFinish | None:
    match piece.finish_reason:
        case None:
            return None
        case "stop":
            return NativeFinish("stop", matched=piece.matched)
        case "length":
            return NativeFinish("length", length=tokens)
        case "abort":
            return NativeFinish("abort", message="ended by POST /abort_request")
