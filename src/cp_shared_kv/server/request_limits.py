"""What one request may ask for, derived from what the engine holds."""

from __future__ import annotations

from collections.abc import Sequence

from cp_shared_kv.engine.api import EngineDescription
from cp_shared_kv.errors import RequestTooLongError
from cp_shared_kv.server.api_error import ApiError

DEFAULT_MAX_TOKENS = 16
"""Output tokens when a completion does not say, as in OpenAI's API."""
BODY_BYTES_PER_TOKEN = 32
"""More than tokens take on average, as text or as JSON numbers, so that a prompt a little too
long is told so by its tokens and not by its bytes."""
BODY_BYTES_BASE = 2**20


class RequestLimits:
    """Limits of one request. All figures are tokens but `body_bytes`."""

    def __init__(self, description: EngineDescription) -> None:
        self._vocab_size = description.vocab_size
        self._prompt_limit = description.logical_tokens
        self._total_limits = (
            (description.decode_tokens, "KV capacity of the decode worker"),
            (description.context_length, "context length"),
        )
        self.body_bytes = BODY_BYTES_BASE + BODY_BYTES_PER_TOKEN * description.context_length

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse (400) ids that the model has no embedding for. `token_ids` is not empty; `param`
        is the field that they came in."""
        if min(token_ids) >= 0 and max(token_ids) < self._vocab_size:
            return
        at, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size)
        raise ApiError(
            400,
            f"the prompt's token id {bad} at index {at} is not in the vocabulary; "
            f"allowed: 0 to {self._vocab_size - 1}",
            param=param,
        )

    def output_tokens(
        self, prompt_tokens: int, max_tokens: int | None, default: int = DEFAULT_MAX_TOKENS
    ) -> int:
        """How many tokens to generate at most: `max_tokens`, or else `default` and fewer where the
        prompt leaves less room.

        Raises `RequestTooLongError` for what can never fit, naming the least limit that stands in
        the way. The prefill group holds the prompt alone; the decode worker and the context hold
        prompt and output.
        """
        total = prompt_tokens + (1 if max_tokens is None else max_tokens)
        in_the_way = [(limit, name, total) for limit, name in self._total_limits if total > limit]
        if prompt_tokens > self._prompt_limit:
            prompt_limit = (self._prompt_limit, "logical KV capacity of the prefill group")
            in_the_way.insert(0, (*prompt_limit, prompt_tokens))
        if in_the_way:
            limit, name, value = min(in_the_way, key=lambda way: way[0])
            output = "one output token" if max_tokens is None else f"max_tokens {max_tokens}"
            raise RequestTooLongError(
                f"a prompt of {prompt_tokens} tokens with {output} is too long",
                limit=limit,
                limit_name=name,
                value=value,
            )
        if max_tokens is not None:
            return max_tokens
        room = min(limit for limit, _ in self._total_limits) - prompt_tokens
        return min(default, room)
