"""How a room's output tokens are chosen, as it travels with the room; and what is told of them."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_LOGIT_BIAS_TOKENS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_TOP_LOGPROBS = 20
"""Most alternatives told beside each output token, as in OpenAI's chat API."""
MAX_LOGIT_BIAS = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Bias = Annotated[float, Meta(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
_OutputPenalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_FRACTIONS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What changes the choice of output tokens. Every default changes nothing: greedy.

    engine/sampling says in which order these act. `seed` is always a number: whoever takes the
    request draws one if the client gave none, so that a replay or a retry gives the same tokens.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    """0 is greedy, and so is anything below engine.sampling.state.LEAST_TEMPERATURE."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """0 keeps every token."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[
        float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    ] = 1.0
    """On every token of the prompt and of the output so far."""
    presence_penalty: _OutputPenalty = 0.0
    """On every token of the output so far, once."""
    frequency_penalty: _OutputPenalty = 0.0
    """On every token of the output so far, as often as it is there."""
    logit_bias: Annotated[
        tuple[tuple[TokenId, _Bias], ...], Meta(max_length=MAX_LOGIT_BIAS_TOKENS)
    ] = ()
    """Tokens, each once, and what is added to their logits."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    """Tokens that end the output, beside the model's own end-of-sequence tokens."""
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """No token that would end the output is chosen before it has so many."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Alternatives told beside each token's own log-probability; None tells neither."""

    def __post_init__(self) -> None:
        for name in _FRACTIONS:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: a finite number")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias names a token twice")
        if not all(math.isfinite(bias) for _, bias in self.logit_bias):
            raise ValueError("logit_bias holds a value that is no finite number")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a token id here is not one of the model's."""
        for name, ids in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if ids and max(ids) >= vocab_size:
                raise ValueError(
                    f"{name} holds token id {max(ids)}; allowed: 0 to {vocab_size - 1}"
                )


class SampledLogprobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one output token: its log-probability, and the most likely tokens with theirs.

    From the model's own logits, before anything in `SamplingParams` changed them. `top` runs from
    the most likely down, the lower id first where two are equal; the chosen token need not be in
    it.
    """

    logprob: float
    top: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=MAX_TOP_LOGPROBS)] = ()
