"""SGLang's paged allocator over the logical pages of a group, with a preference among owners."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.integrations.sglang.allocation_order import preferred_first, wanted_owners
from cp_shared_kv.layout.capacity import KVCapacity


class CPSharedPagedTokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """Hands out logical locs. What it promises is what its base class promises.

    Only the order of its free list is other: before a draw, pages whose owners continue the
    requests' turns come to the front, and the base class takes them from there. Any free page
    serves, so a draw fails only when the base class would fail. The list stays on the device.
    """

    def __init__(
        self,
        logical_size: int,
        physical_size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache,
        need_sort: bool,
        cp_size: int,
        cp_rank: int,
    ):
        """ConfigError unless logical_size = physical_size * cp_size, in whole pages."""
        capacity = KVCapacity.from_tokens(physical_size, page_size, cp_size)
        if (physical_size, logical_size) != (capacity.physical_tokens, capacity.logical_tokens):
            raise ConfigError(
                "logical and physical size of an allocator",
                value=(logical_size, physical_size),
                allowed=f"whole pages of {page_size}, logical = physical * {cp_size}",
            )
        self.physical_size = physical_size
        self.cp_size = cp_size
        self.cp_rank = cp_rank
        super().__init__(logical_size, page_size, dtype, device, kvcache, need_sort)

    def alloc(self, need_size: int):
        pages = need_size // self.page_size
        nobody = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._prefer(pages, nobody, [False], [pages])
        return super().alloc(need_size)

    def alloc_extend(
        self,
        prefix_lens,
        prefix_lens_cpu,
        seq_lens,
        seq_lens_cpu,
        last_loc,
        extend_num_tokens,
        **more,
    ):
        before = (prefix_lens_cpu + self.page_size - 1) // self.page_size
        after = (seq_lens_cpu + self.page_size - 1) // self.page_size
        counts = (after - before).tolist()
        margin = extend_num_tokens // self.page_size + len(counts) + 1
        if not self._prefer(margin, last_loc // self.page_size, (before > 0).tolist(), counts):
            return None
        return super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            **more,
        )

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        counts = [int(length % self.page_size == 1) for length in seq_lens_cpu.tolist()]
        has_pages = (seq_lens_cpu > 1).tolist()
        if not self._prefer(len(counts), last_loc // self.page_size, has_pages, counts):
            return None
        return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    def _prefer(self, margin, last_pages, has_pages, counts) -> bool:
        """Whether there are as many pages as the counts say; they are then in the order to take.

        The base class launches its kernel before it counts, which reads past the end of the list.
        """
        # As the base class is about to do, so that the pages it adds have a place in the order.
        if self.need_sort and margin > len(self.free_pages):
            self.merge_and_sort_free()
        pages = sum(counts)
        if pages > len(self.free_pages):
            return False
        if pages:
            wanted = wanted_owners(self.free_pages, last_pages, has_pages, counts, self.cp_size)
            self.free_pages = preferred_first(self.free_pages, wanted, self.cp_size)
        return True
