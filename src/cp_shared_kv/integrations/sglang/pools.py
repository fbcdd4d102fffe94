"""Where SGLang builds its pools: ours in their place, and nothing at all unless all is in place."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import logging

import torch

from cp_shared_kv.errors import StartupError
from cp_shared_kv.integrations.sglang import ATTRIBUTE, settings, verify
from cp_shared_kv.integrations.sglang.capacity import (
    ScratchSize,
    model_pool_spec,
    report_pool,
    scratch_size,
)
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer
from cp_shared_kv.memory.mapped_buffers import MappedBuffer
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.memory.symmetric_buffers import why_not_mapped
from cp_shared_kv.reads.full_view import FullViewReader
from cp_shared_kv.reads.group import TorchGroup
from cp_shared_kv.reads.peer_pull import PeerPullReader
from cp_shared_kv.reads.prefix_reader import PrefixReader
from cp_shared_kv.reads.read_ahead import StreamLane
from cp_shared_kv.reads.scratch import Scratch

_log = logging.getLogger(__name__)


def guard(original, self, *args, **kwargs):
    """Around init_memory_pool, in every scheduler process: StartupError with what is missing."""
    if getattr(self.server_args, ATTRIBUTE, False):
        verify.require_complete()
    return original(self, *args, **kwargs)


def build(original, self):
    """Around _init_pools: for its duration, the names it constructs from are our classes'.

    Not for good: other parts of SGLang ask of objects whether they are of these classes.
    """
    if not getattr(self.server_args, ATTRIBUTE):
        return original(self)
    from sglang.srt.model_executor import model_runner_kv_cache_mixin as mixin

    from cp_shared_kv.integrations.sglang.allocator import CPSharedPagedTokenToKVPoolAllocator
    from cp_shared_kv.integrations.sglang.pool import CPSharedNSATokenToKVPool, shared_pool

    sharing = _targets_sharing(self) if self.is_draft_worker else _new_sharing(self)
    capacity = sharing.capacity

    def allocator(logical_size, **settings_of_allocator):
        return CPSharedPagedTokenToKVPoolAllocator(
            logical_size,
            capacity.physical_tokens,
            cp_size=capacity.cp_size,
            cp_rank=sharing.cp_rank,
            **settings_of_allocator,
        )

    stock = mixin.NSATokenToKVPool, mixin.PagedTokenToKVPoolAllocator
    mixin.NSATokenToKVPool = shared_pool(sharing)
    mixin.PagedTokenToKVPoolAllocator = allocator
    try:
        result = original(self)
    finally:
        mixin.NSATokenToKVPool, mixin.PagedTokenToKVPoolAllocator = stock
    made = type(self.token_to_kv_pool), type(self.token_to_kv_pool_allocator)
    wanted = CPSharedNSATokenToKVPool, CPSharedPagedTokenToKVPoolAllocator
    if not all(issubclass(*pair) for pair in zip(made, wanted, strict=True)):
        raise StartupError(
            "SGLang has built other pools than the shared ones",
            value=", ".join(cls.__name__ for cls in made),
            change="see docs/sglang.md for the models and settings that are supported",
        )
    if not self.is_draft_worker:
        report_pool(capacity)
    return result


def _new_sharing(runner):
    """Of a model's pool. Collective."""
    from sglang.srt.distributed.parallel_state import get_attn_cp_group

    group = get_attn_cp_group().device_group
    device = torch.device(runner.device)
    if device.type == "cuda":  # SGLang names no index: each process has made its GPU the current
        device = torch.device("cuda", torch.cuda.current_device())
    return sharing_over(group, runner.cp_shared_kv_capacity, scratch_size(runner), device)


def _targets_sharing(runner):
    """Of a draft's pool: that of the model it drafts for, whose allocator it was given.

    Both have the same locs and forwards that follow one another, so one scratch serves both.
    """
    target = runner.token_to_kv_pool_allocator.get_kvcache()
    own, wanted = model_pool_spec(runner), target.pages.spec
    if (own.latent, own.index) != (wanted.latent, wanted.index):
        raise StartupError(
            "pages of the draft's KV",
            value=(own.latent, own.index),
            allowed=f"the model's: {wanted.latent}, {wanted.index}",
            change="draft with the model's own next-token layer",
        )
    return target.sharing


def sharing_over(
    process_group: torch.distributed.ProcessGroup,
    capacity: KVCapacity,
    size: ScratchSize,
    device: torch.device,
):
    """The parts of the core that a rank shares by. Collective.

    Where the GPUs of the group can read each other, pages lie in plain CUDA memory that all ranks
    map, and are pulled from their owners; else they go by a byte all-gather, which works on any
    group. A transport can register either memory.
    """
    from cp_shared_kv.integrations.sglang.pool import Sharing

    scratch = Scratch(size.limit_bytes, device)
    group = TorchGroup(process_group)
    pulled = _pulled(process_group, device)

    def make_buffer(nbytes: int) -> Buffer:
        if pulled:
            return MappedBuffer.create(nbytes, process_group, device)
        return PrivateBuffer(nbytes, device)

    def make_reader(pool: KVPool) -> PrefixReader:
        if pulled:
            return PeerPullReader(group.cp_rank, pool)
        return FullViewReader(group, pool, scratch)

    # A gather of the next layer would meet other ranks out of turn.
    lane = StreamLane(device) if pulled else None
    return Sharing(
        capacity, group.cp_rank, scratch, make_buffer, make_reader, lane, size.batch_pages
    )


def _pulled(process_group: torch.distributed.ProcessGroup, device: torch.device) -> bool:
    """Whether prefixes are pulled from their owners. The same on all ranks, and in their log."""
    wanted = settings.read()
    reason = f"{settings.READ}={wanted}" if wanted == "collective" else None
    if reason is None:
        reason = "no CUDA"
        if device.type == "cuda":
            reason = why_not_mapped(process_group, device, one_gpu_will_do=True)
    if wanted == "pull" and reason is not None:
        raise StartupError(
            "GPUs of the CP group cannot read each other's memory",
            value=reason,
            change=f"{settings.READ}=auto or collective, or all ranks on one host",
        )
    way = "are pulled from their owners" if reason is None else f"go by all-gather ({reason})"
    _log.info("CP shared KV: cached prefixes %s", way)
    return reason is None
