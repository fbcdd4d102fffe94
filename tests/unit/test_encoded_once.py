"""A value becomes bytes once; the wire, the owner's pool and the staging hold those same bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PageFormat
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads.forward_kv import BatchSpan, ForwardKV
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.scratch import Scratch

PAGE_SIZE, TOKENS = 4, 6


class EchoingGroup:
    """Rank 0 of two; the other rank sends what this one does. Keeps what went over the wire."""

    cp_rank, cp_size = 0, 2

    def __init__(self) -> None:
        self.wire: list[bytes] = []

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        self.wire.append(local.numpy().tobytes())
        out[:] = local

    def barrier(self) -> None:
        pass


class KeptScratch(Scratch):
    """Remembers what was taken for what."""

    taken: dict[str, torch.Tensor]

    def take(self, purpose: str, nbytes: int) -> torch.Tensor:
        self.taken = {**getattr(self, "taken", {}), purpose: super().take(purpose, nbytes)}
        return self.taken[purpose]


def noting(encoded: list[str], encode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`encode`, with a note of whose it was each time that it is called."""

    def noted(codec: PageFormat, *values: torch.Tensor) -> torch.Tensor:
        encoded.append(codec.fingerprint)
        return encode(codec, *values)

    return noted


@pytest.mark.parametrize(
    "formats",
    [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp8_scaled"), ("fp8_ds_mla", "fp8_scaled")],
    ids="+".join,
)
def test_wire_pool_and_staging_hold_the_bytes_of_one_encoding(
    formats: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = KVPoolSpec(
        latent_format(formats[0], kv_lora_rank=256, qk_rope_head_dim=4, page_size=PAGE_SIZE),
        index_format(formats[1], index_head_dim=128, page_size=PAGE_SIZE),
        num_layers=1,
        index_layers=(0,),
    )
    # Tokens 0, 2 and 4 are this rank's; the echo makes token 2i + 1 equal to token 2i.
    mine = torch.randn(3, 256), torch.randn(3, 4), torch.randn(3, 128)
    latent_rows, index_rows = spec.latent.encode(*mine[:2]), spec.index.encode(mine[2])

    group, scratch = EchoingGroup(), KeptScratch(1 << 20)
    pools = [KVPool(spec, 4, PrivateBuffer(spec.pool_bytes(4))) for _ in range(2)]
    kv = ForwardKV.build(
        pools[0],
        CpSharedKVLayout(PAGE_SIZE, 2, 0, physical_pages=4),
        group,
        PullReader(group, pools),
        [BatchSpan(LogicalPages(np.array([3, 6])), 0, TOKENS)],  # of rank 0 and of rank 1
        "round-robin-split",
        scratch=scratch,
    )
    encoded: list[str] = []
    for kind in (type(spec.latent), type(spec.index)):
        monkeypatch.setattr(kind, "encode", noting(encoded, kind.encode))
    kv.store(0, *mine)
    kv.latent(0, kv.requests[0].slots)
    assert len(list(kv.index_pieces(0))) == 1
    assert encoded == [spec.latent.fingerprint, spec.index.fingerprint]

    assert group.wire == [torch.cat((latent_rows, index_rows), dim=1).numpy().tobytes()]
    in_order = torch.tensor([0, 0, 1, 1, 2, 2])
    for codec, rows, kind in (
        (spec.latent, latent_rows, "latent"),
        (spec.index, index_rows, "index"),
    ):
        staged = scratch.taken[f"{kind} pages"].view(-1, codec.page_bytes)
        assert torch.equal(codec.gather_rows(staged, kv.requests[0].slots), rows[in_order])
        physical_page = 2  # of logical page 3, at its owner
        stored = torch.arange(PAGE_SIZE) + physical_page * PAGE_SIZE
        assert torch.equal(codec.gather_rows(pools[0].pages(kind, 0), stored), rows[in_order[:4]])
