"""The distinct tokens that a request has seen, and how often it has put each out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FIRST_ROOM_TOKENS = 64


class TokenHistory:
    """Grows by one token a step without looking at the others again.

    `prompt_token_ids` int64, each once: seen, but not put out.
    """

    def __init__(self, prompt_token_ids: npt.NDArray[np.int64]) -> None:
        self._size = len(prompt_token_ids)
        self._ids = np.zeros(self._size + _FIRST_ROOM_TOKENS, dtype=np.int64)
        self._ids[: self._size] = prompt_token_ids
        self._counts = np.zeros_like(self._ids)
        self._slots = {token: slot for slot, token in enumerate(prompt_token_ids.tolist())}

    def append(self, token_id: int) -> None:
        """Count one token of the output."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self._size
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._size += 1
        self._counts[slot] += 1

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """int64[distinct tokens], in no particular order. A view: valid until the next append."""
        return self._ids[: self._size]

    @property
    def output_counts(self) -> npt.NDArray[np.int64]:
        """How often each of `token_ids` is in the output; 0 for those of the prompt alone."""
        return self._counts[: self._size]
