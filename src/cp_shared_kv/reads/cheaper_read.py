"""For each batch on GPUs: all pages of its prefixes, or index K and the rows that are selected."""

from __future__ import annotations

import logging

from cp_shared_kv.memory.pool import KVPoolSpec
from cp_shared_kv.reads.plan import ReadPlan
from cp_shared_kv.reads.read_costs import (
    BatchReads,
    ModelReads,
    push_is_faster,
    sparse_seconds,
    whole_seconds,
)

_log = logging.getLogger(__name__)


class CheaperRead:
    """Chooses by what each way is estimated to take. The choice follows from the batch and the
    sizes of the run, which all ranks have alike."""

    def __init__(self, spec: KVPoolSpec, topk: int, most_tokens: int | None) -> None:
        """topk: rows that a token selects; most_tokens: of a prefix that scratch holds whole."""
        self._model = ModelReads(
            layers=spec.num_layers,
            index_layers=len(spec.index_layers),
            page_size=spec.page_size,
            row_bytes=spec.latent.row_bytes,
            index_page_bytes=spec.page_bytes("index"),
            topk=topk,
        )
        self._most_pages = None if most_tokens is None else most_tokens // spec.page_size

    def is_sparse(self, plan: ReadPlan, new_tokens: int) -> bool:
        """Whether a batch is read by selected rows; new_tokens: of the rank that computes most.

        Always where its prefixes are more than scratch holds.
        """
        batch = BatchReads(len(plan.logical_pages), plan.most_remote_pages, new_tokens)
        if not batch.pages:
            return False
        whole = whole_seconds(self._model, batch)
        sparse = sparse_seconds(self._model, batch, self._most_pages)
        fits = self._most_pages is None or batch.pages <= self._most_pages
        chosen = not fits or sparse < whole
        if _log.isEnabledFor(logging.DEBUG):
            latent_bytes = batch.remote_pages * self._model.latent_page_bytes
            _log.debug(
                "reads of %d prefix pages for %d new tokens of a rank: %s "
                "(estimated: whole prefix %.0f us by %s%s, sparse %.0f us)",
                batch.pages,
                batch.new_tokens,
                "sparse" if chosen else "whole",
                whole * 1e6,
                "push" if push_is_faster(latent_bytes) else "pull",
                "" if fits else ", which scratch does not hold",
                sparse * 1e6,
            )
        return chosen
