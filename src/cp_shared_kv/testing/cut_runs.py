"""Byte ranges cut in pieces, as a write is that does not go in one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cp_shared_kv.transfer.transport import Runs


def cut_at_byte(runs: Runs, nbytes: int) -> tuple[Runs, Runs]:
    """The first `nbytes` of the runs in their order, and the rest; a range may be cut in two."""
    ends = np.cumsum(runs.nbytes)
    head_bytes = np.clip(nbytes - (ends - runs.nbytes), 0, runs.nbytes)
    return _part(runs, 0 * head_bytes, head_bytes), _part(runs, head_bytes, runs.nbytes)


def cut_in_parts(runs: Runs, parts: int, chance: np.random.Generator) -> list[Runs]:
    """Up to `parts` pieces, cut at random bytes; in order and none of them empty."""
    rest, cut = runs, list[Runs]()
    for left in range(parts, 1, -1):
        head, rest = cut_at_byte(rest, int(chance.integers(2 * rest.total_bytes // left + 1)))
        cut.append(head)
    return [part for part in (*cut, rest) if part.count]


def _part(runs: Runs, start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> Runs:
    kept = stop > start
    return Runs(
        runs.local_region,
        runs.remote_region,
        (runs.local_offset_bytes + start)[kept],
        (runs.remote_offset_bytes + start)[kept],
        (stop - start)[kept],
    )
