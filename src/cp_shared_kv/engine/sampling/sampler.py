"""The next token of every row of a batch; the package's docstring says in which order all acts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cp_shared_kv.engine.sampling.filters import keep_min_p, keep_top_k, keep_top_p, scale
from cp_shared_kv.engine.sampling.greedy import sample_greedy
from cp_shared_kv.engine.sampling.gumbel import draw
from cp_shared_kv.engine.sampling.logit_edits import edit_logits
from cp_shared_kv.engine.sampling.logprobs import token_logprobs
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.transfer.sampling_params import SampledLogprobs


class SampledToken(NamedTuple):
    """A chosen token, and its log-probabilities where the request asked for them."""

    token_id: int
    logprobs: SampledLogprobs | None = None


def sample_where_numbers(
    logits: torch.Tensor, requests: Sequence[SamplingState | None]
) -> list[SampledToken | None]:
    """`sample` for logits of any kind: None for a row that offers no choice.

    That is a row with NaN or +infinity in it, or with nothing above -infinity. The other rows come
    out as if it were not there.
    """
    # One pass over all rows: the largest of a row with a NaN is NaN.
    sound = logits.amax(dim=-1).isfinite()
    if bool(sound.all()):
        return list(sample(logits, requests))
    rows = torch.nonzero(sound).squeeze(-1).tolist()
    chosen: list[SampledToken | None] = [None] * len(requests)
    for row, token in zip(rows, sample(logits[rows], [requests[r] for r in rows]), strict=True):
        chosen[row] = token
    return chosen


def sample(logits: torch.Tensor, requests: Sequence[SamplingState | None]) -> list[SampledToken]:
    """Choose a token for each row. `logits`: float[rows, vocab]; stays as it is.

    The largest of each row must be finite; `sample_where_numbers` looks. Where `min_tokens` masks
    all that is left, the token is the lowest id.

    `requests` says how, row by row; None is greedy. They are not advanced: whoever takes a token
    into the output does that (`SamplingState.append`).
    """
    chosen = _choose(logits, requests)
    asked = [
        (row, request.params.logprobs)
        for row, request in enumerate(requests)
        if request is not None and request.params.logprobs is not None
    ]
    if not asked:
        return [SampledToken(token) for token in chosen]
    rows = [row for row, _ in asked]
    told = token_logprobs(logits[rows], [chosen[row] for row in rows], [n for _, n in asked])
    by_row = dict(zip(rows, told, strict=True))
    return [SampledToken(token, by_row.get(row)) for row, token in enumerate(chosen)]


def _choose(logits: torch.Tensor, requests: Sequence[SamplingState | None]) -> list[int]:
    special = {
        row: request
        for row, request in enumerate(requests)
        if request is not None and not request.is_plain
    }
    if not special:
        return sample_greedy(logits)
    plain = [row for row in range(len(requests)) if row not in special]
    chosen = dict(zip(plain, sample_greedy(logits[plain]), strict=True))
    chosen |= _choose_special(logits, special)
    return [chosen[row] for row in range(len(requests))]


def _choose_special(logits: torch.Tensor, special: dict[int, SamplingState]) -> dict[int, int]:
    rows, requests = list(special), list(special.values())
    scores = logits[rows].float()  # a copy: the log-probabilities need the original
    edit_logits(scores, requests)
    drawn = [at for at, request in enumerate(requests) if request.draws]
    largest = [at for at, request in enumerate(requests) if not request.draws]
    chosen = dict(zip(largest, sample_greedy(scores[largest]), strict=True))
    if drawn:
        chosen |= zip(drawn, _draw(scores[drawn], [requests[at] for at in drawn]), strict=True)
    return {rows[at]: token for at, token in chosen.items()}


def _draw(scores: torch.Tensor, requests: Sequence[SamplingState]) -> list[int]:
    params = [request.params for request in requests]
    scores = scale(scores, [p.temperature for p in params])
    scores = keep_min_p(scores, [p.min_p for p in params])
    scores = keep_top_k(scores, [p.top_k for p in params])
    scores = keep_top_p(scores, [p.top_p for p in params])
    on_host = scores.cpu().numpy()
    return [
        draw(row, request.params.seed, request.position)
        for row, request in zip(on_host, requests, strict=True)
    ]
