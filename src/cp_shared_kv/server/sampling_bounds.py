"""What each number of a request's sampling may be, in the words of an error message."""

from __future__ import annotations

from cp_shared_kv.transfer.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)

MAX_CHOICES = 128
"""As in OpenAI's API. Each choice is a request of its own to the engine."""
MAX_TIMEOUT_SECONDS = 86_400.0

_LEAST_MOST: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logit_bias": (-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS),
    "n": (1, MAX_CHOICES),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "top_logprobs_num": (0, MAX_TOP_LOGPROBS),
}
_ABOVE_UP_TO: dict[str, tuple[float, float]] = {
    "top_p": (0, 1),
    "timeout": (0, MAX_TIMEOUT_SECONDS),
}


def out_of_bounds(name: str, value: float) -> str | None:
    """What is allowed instead, where `value` is not; None where it is."""
    if name in _ABOVE_UP_TO:
        least, most = _ABOVE_UP_TO[name]
        return None if least < value <= most else f"more than {least:g} and at most {most:g}"
    least, most = _LEAST_MOST[name]
    if least <= value <= most:
        return None
    return f"{least} to {most}" + (" (-1 and 0 keep every token)" if name == "top_k" else "")
