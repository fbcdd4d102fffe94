"""A batch of several requests is admitted only as far as scratch holds its pages."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from cp_shared_kv.integrations.sglang.support import PAGE_SIZE


def add_one_req(original, self, req, *args, **kwargs):
    """Around PrefillAdder.add_one_req: another request waits for the next batch if it must.

    The first of a batch is always let in: scratch holds the longest context.
    """
    from sglang.srt.managers.schedule_policy import AddReqResult

    pool = self.token_to_kv_pool_allocator.get_kvcache()
    if self.can_run_list:
        pages = sum(_pages(other) for other in self.can_run_list) + _pages(req)
        if pages > pool.sharing.batch_pages:
            return AddReqResult.OTHER
    return original(self, req, *args, **kwargs)


def _pages(req) -> int:
    return -(-(len(req.prefix_indices) + req.extend_input_len) // PAGE_SIZE)
