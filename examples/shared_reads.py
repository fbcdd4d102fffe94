"""Two ranks, as threads: each stores the pages it owns, and both read the whole prompt."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from cp_shared_kv import CpSharedKVLayout
from cp_shared_kv.layout import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads.forward_kv import ForwardKV
from cp_shared_kv.reads.plan import BatchSpan
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.scratch import Scratch

# One layer of a toy model, without an indexer. A page is 4 tokens, a rank has room for 3 pages.
latent = latent_format("fp32", kv_lora_rank=6, qk_rope_head_dim=2, page_size=4)
index = index_format("fp32", index_head_dim=4, page_size=4)
SPEC = KVPoolSpec(latent, index, num_layers=1, index_layers=())
POOLS = [KVPool(SPEC, 3, PrivateBuffer(SPEC.pool_bytes(3))) for _ in range(2)]
PROMPT = LogicalPages(np.arange(1, 6))  # five pages: rank 0 owns three of them, rank 1 two
COMPUTED = torch.arange(20.0 * 8).reshape(20, 8)  # what a model would make of 20 tokens


class Threads:
    """All that reads ask of a group. Between processes it is reads.group.TorchGroup."""

    cp_size, meeting, board = 2, threading.Barrier(2), dict[int, torch.Tensor]()

    def __init__(self, cp_rank: int) -> None:
        self.cp_rank = cp_rank

    def barrier(self) -> None:
        self.meeting.wait()

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        self.board[self.cp_rank] = local
        self.barrier()
        torch.stack([self.board[0], self.board[1]], out=out)
        self.barrier()


def run(rank: int) -> str:
    group = Threads(rank)
    layout = CpSharedKVLayout(page_size=4, cp_size=2, cp_rank=rank, physical_pages=3)
    reader, scratch = PullReader(group, POOLS), Scratch(limit_bytes=1 << 20)
    kv = None
    # Two batches of ten tokens. The second finds the first in the pools and reads it as prefix.
    for prefix in (0, 10):
        batch = [BatchSpan(PROMPT, prefix_len=prefix, new_len=10)]
        split = "round-robin-split"
        kv = ForwardKV.build(POOLS[rank], layout, group, reader, batch, split, scratch=scratch)
        mine = COMPUTED[kv.positions]  # a rank computes half of the new tokens ...
        kv.store(0, mine[:, :6], mine[:, 6:], None)  # ... and keeps all of those in its pages
    assert kv is not None
    right = torch.equal(torch.cat(kv.latent(0, kv.requests[0].slots), dim=1), COMPUTED)
    stored = int(POOLS[rank].pages("latent", 0).any(dim=1).sum())  # pages that are not all zero
    return f"rank {rank} stores {stored} pages of 5 and reads all 20 tokens right: {right}"


with ThreadPoolExecutor(2) as threads:
    for line in threads.map(run, range(2)):
        print(line)
