"""What must be true of a group of two ranks and its decode worker: answers, and what pages hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import Admitted, RoomRefused, Tokens
from cp_shared_kv.memory.logical_pool import LogicalPool

EPOCH, DECODE_EPOCH = 100, 200
DECODE = Life("decode", 0, 1)
PAGE_SIZE, CP_SIZE, VOCAB, EOS = 4, 2, 100, 14
Prompt = tuple[int, ...]


def first_token(prompt: Prompt) -> int:
    return 10 + sum(prompt) % 5


def page_content(prompt: Prompt, position: int) -> Prompt:
    """What a page holds once it is complete: all tokens up to its end decide its KV."""
    return prompt[: (position + 1) * PAGE_SIZE]


@dataclass
class Client:
    """One request as its client sees it."""

    prompt: Prompt
    max_tokens: int
    ignore_eos: bool
    cancelled: bool = False
    harmed: bool = False  # a write of it was broken, or decode could never hold it
    tokens: list[int] = field(default_factory=list[int])
    finish: str | None = None
    refusals: int = 0
    decode_ends: int = 0

    @property
    def over(self) -> bool:
        return self.finish is not None or self.refusals > 0

    def expected(self) -> tuple[list[int], str]:
        output: list[int] = []
        token = first_token(self.prompt)
        while True:
            output.append(token)
            if token == EOS and not self.ignore_eos:
                return output, "stop"
            if len(output) == self.max_tokens:
                return output, "length"
            token += 1

    def hear(self, sender: str, message: Tokens | Admitted | RoomRefused) -> None:
        """One answer of the group or of decode: it must be due, and right so far."""
        if isinstance(message, Admitted):
            assert message.cached_tokens < len(self.prompt)
            return
        if sender == "decode":
            assert not self.decode_ends, "decode said something behind its last word"
        if isinstance(message, RoomRefused):
            self.refusals += 1
            self.decode_ends += sender == "decode"
            assert self.cancelled or self.harmed, message.reason
            return
        self.tokens += message.token_ids
        output, finish = self.expected()
        assert self.tokens == output[: len(self.tokens)]
        if message.finish_reason is not None:
            self.decode_ends += 1
            self.finish = message.finish_reason
            if message.finish_reason == "abort":
                assert self.cancelled
            else:
                assert (self.tokens, message.finish_reason) == (output, finish)


@dataclass
class Books:
    """Who asked for what, the two pools, and the tokens that each page of both holds."""

    pool: LogicalPool
    decode_pool: LogicalPool
    clients: dict[int, Client] = field(default_factory=dict[int, Client])
    prefill_content: dict[int, Prompt] = field(default_factory=dict[int, Prompt])
    decode_content: dict[int, Prompt] = field(default_factory=dict[int, Prompt])
