"""What the model without weights answers, and what the pages of its tokens hold.

Tokens decide everything, so a page that is read too early, sent too late or reused too soon shows
at once: it holds another number than its tokens say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

EOS = 14
VOCAB_SIZE = 500
_MODULUS = (1 << 61) - 1
_FACTOR = 1_000_003


def first_token(prompt: Sequence[int]) -> int:
    """The first output token; each further one is its predecessor plus one."""
    return 10 + sum(prompt) % 5


def expected_answer(
    prompt: Sequence[int], max_tokens: int, ignore_eos: bool
) -> tuple[list[int], Literal["stop", "length"]]:
    """The whole output of a request, and why it ends."""
    output: list[int] = []
    token = first_token(prompt)
    while True:
        output.append(token)
        if token == EOS and not ignore_eos:
            return output, "stop"
        if len(output) == max_tokens:
            return output, "length"
        token += 1


def prefix_numbers(tokens: Sequence[int]) -> list[int]:
    """A number for each prefix of `tokens`, the empty one first; other tokens, another number."""
    numbers = [1]
    for token in tokens:
        numbers.append((numbers[-1] * _FACTOR + token + 7) % _MODULUS)
    return numbers


def page_numbers(tokens: Sequence[int], page_size: int) -> list[int]:
    """What each page of a request holds once these are all its tokens: its KV depends on all
    tokens up to its last."""
    numbers = prefix_numbers(tokens)
    ends = range(page_size, len(tokens) + page_size, page_size)
    return [numbers[min(end, len(tokens))] for end in ends]
