"""Which GPU a process computes on, and how torch is set up there."""

from __future__ import annotations

import logging
import os

import torch

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.lives import Life

logger = logging.getLogger("cp_shared_kv")


def gpu_index(config: EngineConfig, gpus: int, unit_index: int, rank: int | None) -> int:
    """The GPU of a rank of that prefill group, or (rank None) of that decode worker.

    Ranks take the first ones, group after group, and decode workers go on from there; past the last
    GPU it begins again with the first. The ranks of a group share one only if they may.
    """
    if rank is not None:
        return (unit_index * config.cp_size + rank) % gpus
    return (config.prefill_groups * config.cp_size + unit_index) % gpus


def occupants(config: EngineConfig, gpus: int) -> list[tuple[int, int]]:
    """For each GPU how many ranks and how many decode workers compute on it."""
    counts = [[0, 0] for _ in range(gpus)]
    for group in range(config.prefill_groups):
        for rank in range(config.cp_size):
            counts[gpu_index(config, gpus, group, rank)][0] += 1
    for worker in range(config.decode_workers):
        counts[gpu_index(config, gpus, worker, None)][1] += 1
    return [(ranks, workers) for ranks, workers in counts]


def set_up_device(config: EngineConfig, life: Life, rank: int | None) -> torch.device:
    """Claim the place of this process, for a rank or (rank None) a decode worker."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if config.device == "cpu":
        return torch.device("cpu")
    # Read when CUDA starts: products that do not depend on which stream they run on.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Multicast through the switches is never used: what it breaks, others share.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", gpu_index(config, gpus, life.index, rank))
    torch.cuda.set_device(device)
    # Sums in fp32, whatever the inputs: what a page holds must not depend on a split of a product.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    ranks, workers = occupants(config, gpus)[device.index]
    logger.info(
        "computes on %s, %s, of %d; %d rank(s) and %d decode worker(s) are on it",
        device,
        torch.cuda.get_device_name(device),
        gpus,
        ranks,
        workers,
    )
    return device
