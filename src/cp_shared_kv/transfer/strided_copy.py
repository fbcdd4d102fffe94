"""Copy many byte ranges between two buffers with few calls."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]

# Below this many ranges, making the two strided views costs more than it saves.
_SHORTEST_STRETCH = 4


def copy_runs(
    source: Memory,
    destination: Memory,
    source_offset_bytes: npt.NDArray[np.int64],
    destination_offset_bytes: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
) -> None:
    """Copy `nbytes[i]` bytes for each i. Every range must have been checked against its buffer.

    Ranges of one length at even distances on both sides, such as a rank's pages on a receiver
    that gave them every N-th page, go as one strided copy: the smaller the range, the more that
    saves (benchmarks/micro/shared_memory_transport.py). NumPy lets go of the GIL in each copy.
    """
    from_bytes, to_bytes = source_offset_bytes.tolist(), destination_offset_bytes.tolist()
    lengths = nbytes.tolist()
    done = 0
    for start, stop in _even_stretches(source_offset_bytes, destination_offset_bytes, nbytes):
        _copy_one_by_one(source, destination, from_bytes, to_bytes, lengths, done, start)
        shape = (stop - start, lengths[start])
        step_from = from_bytes[start + 1] - from_bytes[start]
        step_to = to_bytes[start + 1] - to_bytes[start]
        # ndarray() checks the view against its buffer; as_strided would not, and is slower.
        rows = np.ndarray(shape, np.uint8, source, from_bytes[start], (step_from, 1))
        np.ndarray(shape, np.uint8, destination, to_bytes[start], (step_to, 1))[...] = rows
        done = stop
    _copy_one_by_one(source, destination, from_bytes, to_bytes, lengths, done, len(lengths))


def _copy_one_by_one(
    source: Memory,
    destination: Memory,
    from_bytes: list[int],
    to_bytes: list[int],
    lengths: list[int],
    start: int,
    stop: int,
) -> None:
    for i in range(start, stop):
        begin_from, begin_to, length = from_bytes[i], to_bytes[i], lengths[i]
        destination[begin_to : begin_to + length] = source[begin_from : begin_from + length]


def _even_stretches(
    source_offset_bytes: npt.NDArray[np.int64],
    destination_offset_bytes: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
) -> Iterator[tuple[int, int]]:
    """[start, stop) of ranges with one length and one step on each side, ascending, disjoint."""
    if len(nbytes) < _SHORTEST_STRETCH:
        return
    step_from, step_to = np.diff(source_offset_bytes), np.diff(destination_offset_bytes)
    # Step i leads from range i to i + 1; the stretch goes on where step i + 1 is the same.
    # Rows of one strided copy must not overlap.
    joins = (nbytes[1:] == nbytes[:-1]) & (np.abs(step_to) >= nbytes[1:])
    goes_on = joins[1:] & joins[:-1] & (np.diff(step_from) == 0) & (np.diff(step_to) == 0)
    edges = np.flatnonzero(np.diff(goes_on, prepend=False, append=False))
    taken = 0
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        # Steps first..end are one, so ranges first..end + 1 are; a neighbour may have the first.
        start, stop = max(first, taken), end + 2
        if stop - start >= _SHORTEST_STRETCH:
            yield start, stop
            taken = stop
