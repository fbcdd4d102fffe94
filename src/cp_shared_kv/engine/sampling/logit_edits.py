"""What changes logits before the temperature: masks, biases and penalties. Greedy sees it too.

Each walks the whole batch at once; a row that asks for nothing costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.engine.sampling.state import SamplingState


def edit_logits(scores: torch.Tensor, requests: Sequence[SamplingState]) -> None:
    """Apply, in place, what each request asks for. `scores`: float32[rows, vocab]."""
    _mask_endings(scores, requests)
    _add_biases(scores, requests)
    _apply_penalties(scores, requests)


def _mask_endings(scores: torch.Tensor, requests: Sequence[SamplingState]) -> None:
    at = _Entries(scores.device)
    for row, request in enumerate(requests):
        if not request.may_end:
            at.add(row, np.array(sorted(request.ending_ids), dtype=np.int64))
    if at:
        scores[at.index()] = -torch.inf


def _add_biases(scores: torch.Tensor, requests: Sequence[SamplingState]) -> None:
    at = _Entries(scores.device)
    for row, request in enumerate(requests):
        if request.params.logit_bias:
            tokens, biases = zip(*request.params.logit_bias, strict=True)
            at.add(row, np.array(tokens, dtype=np.int64), np.array(biases))
    if at:
        scores[at.index()] += at.values()[0]


def _apply_penalties(scores: torch.Tensor, requests: Sequence[SamplingState]) -> None:
    """Repetition: a positive logit is divided by it, any other multiplied (CTRL, arXiv 1909.05858,
    as Hugging Face and vLLM mend it for negative logits). Frequency and presence: OpenAI's
    mu[j] - count[j] * frequency - (count[j] > 0) * presence, over the output."""
    at = _Entries(scores.device)
    for row, request in enumerate(requests):
        if request.history is not None and request.history.token_ids.size:
            params, counts = request.params, request.history.output_counts
            at.add(
                row,
                request.history.token_ids,
                np.full(len(counts), params.repetition_penalty),
                counts * params.frequency_penalty,
                (counts > 0) * params.presence_penalty,
            )
    if not at:
        return
    index = at.index()
    repetition, frequency, presence = at.values()
    found = scores[index]
    found = torch.where(found > 0, found / repetition, found * repetition)
    # A penalty below 1 may carry a huge logit past the end of float32, and infinity is no number.
    scores[index] = (found - frequency - presence).clamp(max=torch.finfo(torch.float32).max)


class _Entries:
    """Places in [rows, vocab], each at most once, with values for each, from many rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[npt.NDArray[np.int64]] = []
        self._ids: list[npt.NDArray[np.int64]] = []
        self._values: list[tuple[npt.NDArray[np.floating[Any]], ...]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(
        self, row: int, ids: npt.NDArray[np.int64], *values: npt.NDArray[np.floating[Any]]
    ) -> None:
        self._rows.append(np.full(len(ids), row, dtype=np.int64))
        self._ids.append(ids)
        self._values.append(values)

    def index(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, ids = np.concatenate(self._rows), np.concatenate(self._ids)
        return torch.from_numpy(rows).to(self._device), torch.from_numpy(ids).to(self._device)

    def values(self) -> list[torch.Tensor]:
        joined = [np.concatenate(column) for column in zip(*self._values, strict=True)]
        return [torch.from_numpy(c).to(self._device, torch.float32) for c in joined]
