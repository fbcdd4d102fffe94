"""A forward's sparse reads by the kernels give what those over shared memory give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.memory.symmetric_buffers import SymmetricBuffer
from cp_shared_kv.reads import forward_kv, index_pieces
from cp_shared_kv.reads.forward_kv import ForwardKV, SparseReads
from cp_shared_kv.reads.peer_pull import PeerPullReader
from cp_shared_kv.reads.plan import BatchSpan
from cp_shared_kv.reads.prefix_reader import PrefixReader
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.pull_rows import PullRowsReader
from cp_shared_kv.reads.read_ahead import ReadAhead
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.reads.selected_rows import SelectedRowsReader
from cp_shared_kv.testing.lanes import LateLane

PAGE_SIZE, PHYSICAL_PAGES, PIECE = 16, 9, 16
LATENT, ROPE, INDEX = 512, 64, 128
SCRATCH_BYTES = 1 << 24


@dataclass
class Alone:
    """A rank that computes all of a batch: the others have no rows to give."""

    cp_rank: int
    cp_size: int

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        out[self.cp_rank].copy_(local)

    def barrier(self) -> None:
        pass

    def split_tokens(
        self, split: str, lengths: Sequence[int], cp_size: int
    ) -> list[npt.NDArray[np.int64]]:
        assert cp_size == self.cp_size
        none = np.arange(0)
        return [np.arange(sum(lengths)) if r == self.cp_rank else none for r in range(cp_size)]


@dataclass
class Mapped:
    """The pools of all ranks in this process, as if each lay in its owner's."""

    rank: int
    buffers: list[torch.Tensor]
    barriers: list[int] = field(default_factory=list)

    @property
    def buffer_ptrs(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self.buffers]

    def get_buffer(self, rank: int, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("kernels go by distances")

    def barrier(self, channel: int) -> None:
        self.barriers.append(channel)


def drawn(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes in which no format finds a NaN: an exponent never has all of its bits."""
    bytes_ = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(bytes_ & 0x3B)


@pytest.mark.parametrize("most_tokens", [None, 50, 2 * PAGE_SIZE])
@pytest.mark.parametrize("latent", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(2, 0), (3, 2)])
def test_keys_and_rows_are_those_of_the_readers_over_shared_memory(
    device: torch.device, latent: str, cp_size: int, cp_rank: int, most_tokens: int | None
) -> None:
    spec = KVPoolSpec(
        latent_format(latent, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, page_size=PAGE_SIZE),
        index_format("fp8_scaled", index_head_dim=INDEX, page_size=PAGE_SIZE),
        num_layers=2,
        index_layers=(0,),
    )
    nbytes = spec.pool_bytes(PHYSICAL_PAGES)
    bytes_of = [drawn(nbytes, seed) for seed in range(cp_size)]
    on_host = [KVPool(spec, PHYSICAL_PAGES, PrivateBuffer(nbytes)) for _ in bytes_of]
    for pool, drawn_bytes in zip(on_host, bytes_of, strict=True):
        pool.buffer.tensor.copy_(drawn_bytes)
    mapped = Mapped(cp_rank, [drawn_bytes.clone().to(device) for drawn_bytes in bytes_of])
    own = KVPool(spec, PHYSICAL_PAGES, SymmetricBuffer(mapped.buffers[cp_rank], mapped))
    scratch, host_scratch = Scratch(SCRATCH_BYTES, device), Scratch(SCRATCH_BYTES)
    pull = PeerPullReader(cp_rank, own)
    by_kernel = SelectedRowsReader(pull, cp_size, own, scratch)

    layout = CpSharedKVLayout(PAGE_SIZE, cp_size, cp_rank, physical_pages=PHYSICAL_PAGES)
    pages = np.random.default_rng(1).permutation(cp_size * PHYSICAL_PAGES) + 1
    spans = [
        BatchSpan(LogicalPages(pages[:8]), 7 * PAGE_SIZE + 3, 5),
        BatchSpan(LogicalPages(pages[8:11]), 2 * PAGE_SIZE, 9),
    ]
    group = Alone(cp_rank, cp_size)

    def build(
        pool: KVPool, reader: PrefixReader, its_scratch: Scratch, sparse: SparseReads
    ) -> ForwardKV:
        with (
            patch.object(index_pieces, "PIECE_TOKENS", PIECE),
            patch.object(forward_kv, "split_tokens", group.split_tokens),
        ):
            return ForwardKV.build(
                pool, layout, group, reader, spans, "in-seq-split",
                scratch=its_scratch, sparse=sparse, ahead=ReadAhead(LateLane()),
            )  # fmt: skip

    got = build(own, pull, scratch, SparseReads(by_kernel, most_tokens))
    expected = build(
        on_host[cp_rank],
        PullReader(group, on_host),
        host_scratch,
        SparseReads(PullRowsReader(on_host, host_scratch), most_tokens),
    )
    assert mapped.barriers == [0]  # one a forward
    for layer in (0, 1):
        values = torch.randn(14, LATENT + ROPE + INDEX, generator=torch.Generator().manual_seed(3))
        for kv in (got, expected):
            here = values.to(device if kv is got else "cpu")
            kv.store(
                layer,
                here[:, :LATENT],
                here[:, LATENT : LATENT + ROPE],
                here[:, LATENT + ROPE :] if layer == 0 else None,
            )
        if layer == 0:
            found, wanted = list(got.index_pieces(0)), list(expected.index_pieces(0))
            assert len(wanted) == (2 if most_tokens is None else 5)
            for mine, right in zip(found, wanted, strict=True):
                assert (mine.request, mine.start) == (right.request, right.start)
                assert torch.equal(mine.keys.cpu(), right.keys)
        slots = torch.cat([request.slots for request in expected.requests])
        for host_slots, mine in zip(expected.requests, got.requests, strict=True):
            assert torch.equal(mine.slots.cpu(), host_slots.slots)
        chosen = torch.randint(-1, len(slots), (14, 12), generator=torch.Generator().manual_seed(1))
        selected = torch.where(chosen < 0, -1, slots[chosen.clamp(min=0)])
        parts = compared_parts(got, expected, layer, selected, device)
        assert parts[0].stop == {None: 14, 50: 4, 32: 2}[most_tokens]
        assert parts[-1].stop == 14


def compared_parts(
    got: ForwardKV,
    expected: ForwardKV,
    layer: int,
    selected: torch.Tensor,
    device: torch.device,
) -> list[slice]:
    """The parts in which rows come, after each of which both give the same rows."""
    parts: list[slice] = []
    for (mine, places), (right, host_places) in zip(
        got.bring(layer, selected.to(device)), expected.bring(layer, selected), strict=True
    ):
        assert mine == right
        assert torch.equal(places.cpu(), host_places)
        named = host_places >= 0
        for values, wanted in zip(
            got.latent(layer, places[named.to(device)]),
            expected.latent(layer, host_places[named]),
            strict=True,
        ):
            assert torch.equal(values.cpu(), wanted)
        parts.append(mine)
    return parts
