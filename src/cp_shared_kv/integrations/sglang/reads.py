"""The plan of a batch when SGLang makes its metadata, and page tables that point at scratch."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import dataclasses

import numpy as np

from cp_shared_kv.errors import InvariantError
from cp_shared_kv.integrations.sglang.batch import SharedBatch
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.reads.plan import BatchSpan


def begin_batch(_result, self, forward_batch) -> None:
    """After NativeSparseAttnBackend.init_forward_metadata: every rank, the same batch.

    Brings the requests' page ids to the host, which waits for the device once a forward. Modes
    other than extend have no plan: a prefill server does not run them, and the pool refuses them.
    """
    pool = forward_batch.token_to_kv_pool
    if not forward_batch.forward_mode.is_extend_without_speculative():
        pool.end()
        return
    requests = _requests(forward_batch, pool.page_size)
    batch = SharedBatch.build(
        pool.layout, requests, forward_batch.req_to_token_pool.req_to_token.device
    )
    pool.begin(batch)
    self.forward_metadata = with_scratch_tables(self.forward_metadata, batch)


def with_scratch_tables(metadata, batch: SharedBatch):
    """SGLang's metadata with each of its tables, by token or by page, pointing at scratch."""
    flattened = metadata.page_table_1_flattened
    return dataclasses.replace(
        metadata,
        page_table_1=batch.locs_in_scratch(metadata.page_table_1),
        real_page_table=batch.pages_in_scratch(metadata.real_page_table),
        page_table_1_flattened=None if flattened is None else batch.locs_in_scratch(flattened),
    )


def _requests(forward_batch, page_size: int) -> list[BatchSpan]:
    prefix_lens = [int(length) for length in forward_batch.extend_prefix_lens_cpu]
    new_lens = [int(length) for length in forward_batch.extend_seq_lens_cpu]
    total_lens = [prefix + new for prefix, new in zip(prefix_lens, new_lens, strict=True)]
    table = forward_batch.req_to_token_pool.req_to_token
    rows = forward_batch.req_pool_indices[: len(total_lens)]
    first_locs = table[rows, : max(total_lens, default=0) : page_size].cpu().numpy()
    if (first_locs % page_size).any():
        raise InvariantError("a request's page does not begin at a page's first loc")
    pages = first_locs.astype(np.int64) // page_size
    return [
        BatchSpan(LogicalPages(pages[i, : -(-total // page_size)]), prefix_lens[i], new_lens[i])
        for i, total in enumerate(total_lens)
    ]
