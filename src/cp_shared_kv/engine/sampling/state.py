"""What the sampler knows of one request beside its logits. Without torch, for the controller."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from cp_shared_kv.engine.sampling.history import TokenHistory
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.sampling_params import SamplingParams

LEAST_TEMPERATURE = 1e-5
"""Below it a temperature is taken for 0, as vLLM does: float32 would overflow soon."""
NO_TOKENS = np.zeros(0, dtype=np.int64)


def prompt_tokens_for_sampling(
    params: SamplingParams, token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The prompt's tokens, each once, if `params` need them; else none."""
    return NO_TOKENS if params.repetition_penalty == 1.0 else np.unique(token_ids)


class SamplingState:
    """One request on its way: its params, how long its output is, what its penalties count.

    `prompt_token_ids` int64, from `prompt_tokens_for_sampling`. Raises `ProtocolError` for a token
    id beyond the vocabulary, so that every id in here may be used as an index.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        prompt_token_ids: npt.NDArray[np.int64] = NO_TOKENS,
    ) -> None:
        try:
            params.check_vocabulary(vocab_size)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        if prompt_token_ids.size and int(prompt_token_ids.max()) >= vocab_size:
            raise ProtocolError(
                "the prompt holds a token that the model does not have",
                value=int(prompt_token_ids.max()),
                allowed=f"0 to {vocab_size - 1}",
            )
        self.params = params
        self.position = 0
        """Tokens of the output so far: the place of the next one."""
        self.ending_ids = frozenset(params.stop_token_ids)
        """Tokens that end the output."""
        if not params.ignore_eos:
            self.ending_ids |= frozenset(eos_token_ids)
        self.history: TokenHistory | None = None
        if (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        ):
            self.history = TokenHistory(prompt_token_ids)

    @property
    def draws(self) -> bool:
        """Whether the token is drawn, not taken as the largest."""
        return self.params.temperature >= LEAST_TEMPERATURE

    @property
    def may_end(self) -> bool:
        """Whether the next token may be one that ends the output."""
        return self.position >= self.params.min_tokens

    @property
    def is_plain(self) -> bool:
        """Whether the next token is the largest of the logits as they come."""
        return not (
            self.draws
            or self.params.logit_bias
            or self.history is not None
            or (self.ending_ids and not self.may_end)
        )

    def append(self, token_id: int) -> bool:
        """Count the next token of the output; returns whether it ends it."""
        ends = self.may_end and token_id in self.ending_ids
        self.position += 1
        if self.history is not None:
            self.history.append(token_id)
        return ends
