"""Ranks that share the only GPU of a machine: enough to see wrong bytes, not to see a link.

NCCL refuses two ranks on one GPU, unless it takes them for two hosts, and then goes over sockets.
torch's symmetric memory refuses them always; what CUDA maps between processes stands in for it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from cp_shared_kv.memory.mapped_buffers import MappedBuffer
from cp_shared_kv.memory.symmetric_buffers import SymmetricBuffer
from cp_shared_kv.testing.rank_process import RankContext

_nccl: dict[int, dist.ProcessGroup] = {}


def shares_a_gpu(context: RankContext) -> bool:
    """Whether there are fewer GPUs than ranks."""
    return torch.cuda.device_count() < context.size


def gpu_of(context: RankContext) -> torch.device:
    """This rank's GPU, made the current one."""
    device = torch.device("cuda", context.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def nccl_process_group(context: RankContext) -> dist.ProcessGroup:
    """The call's ranks over NCCL; made once, since each group has buffers of its own."""
    if shares_a_gpu(context):
        os.environ |= {"NCCL_HOSTID": f"rank-{context.rank}", "NCCL_SOCKET_IFNAME": "lo"}
    if context.size not in _nccl:
        group = dist.new_group(list(range(context.size)), backend="nccl")
        assert isinstance(group, dist.ProcessGroup)
        _nccl[context.size] = group
    return _nccl[context.size]


def peer_memory(
    context: RankContext,
) -> tuple[type[SymmetricBuffer | MappedBuffer], dist.ProcessGroup]:
    """What ranks read in each other's place here, and the group that it is made over."""
    if shares_a_gpu(context):
        return MappedBuffer, nccl_process_group(context)
    return SymmetricBuffer, context.process_group
