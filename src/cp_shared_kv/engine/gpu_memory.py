"""What the GPUs of a run have room for, beside the weights of whoever computes on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.gpus import GPU
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.model_spec import ModelDescription
from cp_shared_kv.engine.placement import occupants
from cp_shared_kv.engine.sizing import MemoryPlace
from cp_shared_kv.errors import CapacityError
from cp_shared_kv.model.tensor_shapes import tensor_shapes

WORKING_BYTES = 4 << 30
"""What a process takes beside weights, pool and scratch: CUDA and NCCL themselves, and the values
of a forward pass, of which model/query_blocks.py bounds the largest."""


def gpu_places(
    config: EngineConfig, model: ModelDescription, gpus: Sequence[GPU]
) -> list[MemoryPlace]:
    """The GPUs that somebody computes on. CapacityError where not even the weights fit."""
    weight_bytes = model.compute_dtype.itemsize * sum(
        math.prod(shape) for shape in tensor_shapes(model.config).values()
    )
    places: list[MemoryPlace] = []
    counts = occupants(config, len(gpus))
    for gpu, (index, (ranks, workers)) in zip(gpus, enumerate(counts), strict=True):
        taken_bytes = (ranks + workers) * (weight_bytes + WORKING_BYTES)
        if not taken_bytes:
            continue
        if taken_bytes >= gpu.free_bytes:
            raise CapacityError(
                f"too little memory on GPU {index} ({gpu.name})",
                value=f"{ranks} ranks and {workers} decode workers, each with {weight_bytes} bytes "
                f"of weights and {WORKING_BYTES} to compute with",
                allowed=f"{gpu.free_bytes} bytes free of {gpu.total_bytes}",
                change="show more GPUs in CUDA_VISIBLE_DEVICES, or stop what else runs there",
            )
        places.append(MemoryPlace(gpu.free_bytes - taken_bytes, ranks, workers))
    return places


def check_gpu_memory(limits: EngineLimits, places: Sequence[MemoryPlace]) -> None:
    """Refuse pools and scratch that a GPU cannot hold together, before any process starts."""
    for place in places:
        rank_bytes = limits.pool_bytes_per_rank + limits.scratch_limit_bytes
        wanted = place.ranks * rank_bytes + place.decode_workers * limits.decode_pool_bytes
        if wanted > place.free_bytes:
            raise CapacityError(
                "too little memory on a GPU for pools and scratch",
                value=f"{wanted} bytes wanted for {place.ranks} ranks and "
                f"{place.decode_workers} decode workers",
                allowed=f"{place.free_bytes} bytes free beside weights",
                change="lower --max-total-tokens, --decode-max-total-tokens or --context-length",
            )
