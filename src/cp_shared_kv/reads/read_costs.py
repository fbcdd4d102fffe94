"""How long a GPU reads a batch's prefixes, each way: bytes over the link by the rates that were
measured between two H200 (docs/gpu/README.md), or what the host takes to ask for them if that
is longer: it runs ahead of the GPU as long as it can."""

from __future__ import annotations

from dataclasses import dataclass

PULL_BYTES_PER_SECOND = 337e9
PUSH_BYTES_PER_SECOND = 368e9
ROWS_BYTES_PER_SECOND = 329e9
BARRIER_SECONDS = 3.1e-6
FIND_SECONDS = 16e-6
"""To find the rows that were selected, make them unique and number them."""
LAUNCH_SECONDS = 21e-6
"""Of the host to read pages by one kernel. Nothing hides it where the reads are short."""
ROWS_HOST_SECONDS = 144e-6
"""Of the host to find rows and to fetch them, copies and conversions included."""
BLOCK_LAUNCHES = 8
"""For a block of index K more: to read it, its scores, and the best so far."""


@dataclass(frozen=True)
class ModelReads:
    """What a model reads of each page, and how many rows a token selects."""

    layers: int
    index_layers: int
    page_size: int
    row_bytes: int
    """Of latent KV."""
    index_page_bytes: int
    topk: int

    @property
    def latent_page_bytes(self) -> int:
        return self.page_size * self.row_bytes


@dataclass(frozen=True)
class BatchReads:
    """The sizes of a batch, which all ranks of a group have alike."""

    pages: int
    """Of its prefixes, each once."""
    remote_pages: int
    """Of these what the rank reads that owns the fewest."""
    new_tokens: int
    """Of the rank that computes most."""


def push_is_faster(remote_bytes: float) -> bool:
    """Whether a push's higher rate outweighs its barrier."""
    return _push_seconds(remote_bytes) < _pull_seconds(remote_bytes)


def whole_seconds(model: ModelReads, batch: BatchReads) -> float:
    """Of a forward that reads all pages, by pull or push."""
    latent_bytes = batch.remote_pages * model.latent_page_bytes
    return model.layers * _pages_seconds(latent_bytes) + model.index_layers * _pages_seconds(
        batch.remote_pages * model.index_page_bytes
    )


def sparse_seconds(model: ModelReads, batch: BatchReads, most_pages: int | None) -> float:
    """Of a forward that reads index K, in blocks of at most `most_pages`, and selected rows.

    How many differ is not known beforehand: it takes them for as many as there can be.
    """
    slots = batch.pages * model.page_size
    indices = batch.new_tokens * model.topk
    index_bytes = batch.remote_pages * model.index_page_bytes
    if most_pages is None or batch.pages <= most_pages:
        rows, parts = min(slots, indices), 1
        index_seconds = _pages_seconds(index_bytes)
    else:
        tokens_at_once = max(1, most_pages * model.page_size // model.topk)
        rows, parts = indices, -(-batch.new_tokens // tokens_at_once)
        blocks = -(-batch.pages // most_pages)
        index_seconds = max(
            index_bytes / PULL_BYTES_PER_SECOND, blocks * BLOCK_LAUNCHES * LAUNCH_SECONDS
        )
    remote_share = batch.remote_pages / max(1, batch.pages)
    row_seconds = rows * remote_share * model.row_bytes / ROWS_BYTES_PER_SECOND
    row_seconds = max(row_seconds + parts * FIND_SECONDS, parts * ROWS_HOST_SECONDS)
    return model.layers * row_seconds + model.index_layers * index_seconds


def _pages_seconds(remote_bytes: float) -> float:
    return min(_pull_seconds(remote_bytes), _push_seconds(remote_bytes))


def _pull_seconds(remote_bytes: float) -> float:
    return max(LAUNCH_SECONDS, remote_bytes / PULL_BYTES_PER_SECOND)


def _push_seconds(remote_bytes: float) -> float:
    return max(LAUNCH_SECONDS, remote_bytes / PUSH_BYTES_PER_SECOND + BARRIER_SECONDS)
