"""Who stores which page of a prompt, and how much four ranks hold together. Needs no torch."""

from __future__ import annotations

import numpy as np

from cp_shared_kv import CpSharedKVLayout, KVCapacity
from cp_shared_kv.layout import LogicalLocs, LogicalPages, PhysicalPages, Positions

# Four ranks, each with memory for 6 pages of 64 tokens. What one rank holds is called physical,
# what the group holds is called logical; no page is stored twice, so the second is 4 times as much.
capacity = KVCapacity(physical_pages=6, page_size=64, cp_size=4)
print(f"one rank: {capacity.physical_tokens} tokens, the group: {capacity.logical_tokens}")

# A prompt of ten pages, more than any rank could hold alone. Logical pages count from 1, for
# page 0 is padding; positions say which page of the prompt each one is and count from 0.
pages = LogicalPages(np.arange(1, 11))
positions = Positions(np.arange(10))
for rank in range(4):
    layout = CpSharedKVLayout(page_size=64, cp_size=4, cp_rank=rank, physical_pages=6)
    mine, their_positions = layout.filter_owned_pages(pages, positions)
    print(f"rank {rank} keeps positions {their_positions} in its physical pages {mine}")

# There is no directory to ask: owner and place are arithmetic, in both directions.
layout = CpSharedKVLayout(page_size=64, cp_size=4, cp_rank=1, physical_pages=6)
print("owners:", layout.owner_for_logical_pages(pages))
print(
    "rank 1's page 3 is logical page",
    *layout.physical_pages_to_logical(PhysicalPages(np.array([3]))),
)

# A loc is the slot of one token: page * page_size + offset. This one lies in page 10.
loc = LogicalLocs(np.array([10 * 64 + 5]))
print("mine:", layout.owned_by_this_rank(loc), "at", layout.logical_locs_to_physical(loc))
