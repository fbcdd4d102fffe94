"""Readers between GPUs, as far as no GPU is needed: what they refuse, and which way they choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.kernels.needs import missing_for_gpus
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads.peer_pull import PeerPullReader
from cp_shared_kv.reads.peer_reader import PeerReader
from cp_shared_kv.reads.plan import BatchSpan, PagesByOwner, ReadPlan
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.reads.selected_rows import SelectedRowsReader

PAGE_SIZE = 16


def make_pool(latent: str, kv_lora_rank: int, rope: int) -> KVPool:
    spec = KVPoolSpec(
        latent_format(
            latent, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=rope, page_size=PAGE_SIZE
        ),
        index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE),
        1,
        (0,),
    )
    return KVPool(spec, 2, PrivateBuffer(spec.pool_bytes(2)))


def make_plan(prefix_pages: int) -> ReadPlan:
    layout = CpSharedKVLayout(PAGE_SIZE, 2, 0)
    pages = LogicalPages(np.arange(1, prefix_pages + 2))
    return ReadPlan.build(layout, [BatchSpan(pages, prefix_pages * PAGE_SIZE, 1)])


def test_a_pool_that_peers_cannot_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"PrivateBuffer.*--kv-read collective,"):
        PeerPullReader(0, make_pool("bf16", 512, 64))


@pytest.mark.parametrize(
    ("latent", "kv_lora_rank", "rope"), [("fp8_ds_mla", 256, 64), ("bf16", 6, 1)]
)
def test_rows_that_a_kernel_cannot_fetch_are_refused(
    latent: str, kv_lora_rank: int, rope: int
) -> None:
    reader = cast(PeerPullReader, None)  # not reached
    with pytest.raises(ConfigError, match="multiple of 16 bytes"):
        SelectedRowsReader(reader, 2, make_pool(latent, kv_lora_rank, rope), Scratch(0))


@dataclass
class Way:
    """Notes the prefixes that it is asked for, in pages."""

    pages_read: int = 0
    bytes_read: int = 0
    read_pages: list[int] = field(default_factory=list)
    begun: int = 0

    def begin(self, plan: ReadPlan) -> None:
        self.begun += 1

    def read(self, kind: str, layer: int, plan: ReadPlan, scratch: torch.Tensor) -> None:
        self.read_pages.append(len(plan.logical_pages))


def test_long_prefixes_are_pushed_and_short_ones_pulled() -> None:
    pull, push = Way(), Way()
    reader = PeerReader(cast(Any, pull), cast(Any, push))
    page_bytes = 3 << 20  # half of a prefix is remote, and from 12.4 MB of it a push is faster
    scratch = torch.empty(0, page_bytes, dtype=torch.uint8)
    for pages in (0, 1, 6, 8, 30):
        plan = make_plan(pages)
        reader.begin(plan)
        reader.read("latent", 0, plan, scratch)
    assert pull.read_pages == [0, 1, 6]
    assert push.read_pages == [8, 30]
    assert pull.begun == push.begun == 5


def test_a_part_of_a_long_prefix_is_pulled() -> None:
    pull, push = Way(), Way()
    reader = PeerReader(cast(Any, pull), cast(Any, push))
    plan = make_plan(30)
    part = PagesByOwner.of(CpSharedKVLayout(PAGE_SIZE, 2, 0), plan.logical_pages[5:25])
    reader.begin(plan)
    reader.read("index", 0, part, torch.empty(0, 3 << 20, dtype=torch.uint8))
    assert (pull.read_pages, push.read_pages) == ([20], [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_is_missing_for_work_on_gpus_is_said() -> None:
    missing = missing_for_gpus(2)
    assert missing is not None
    assert "CPUs" in missing or "no NVIDIA GPU" in missing
