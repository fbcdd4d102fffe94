"""What the tests of sizes share: small pools, configs of every kind of group, and their limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.sizing import resolve_limits
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPoolSpec

Group = Literal["one rank", "replicated", "pull", "collective", "sparse", "auto on GPUs"]
MODEL_CONTEXT = 4096
MIB = 2**20


def pool_spec(
    page_size: int = 64, layers: int = 3, index_layers: tuple[int, ...] = (0, 2)
) -> KVPoolSpec:
    return KVPoolSpec(
        latent=latent_format("fp32", kv_lora_rank=8, qk_rope_head_dim=4, page_size=page_size),
        index=index_format("fp32", index_head_dim=4, page_size=page_size),
        num_layers=layers,
        index_layers=index_layers,
    )


def config(group: Group = "pull", cp_size: int = 4, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"model_path": Path("/models/tiny")}
    if group != "one rank":
        values |= {
            "attention_context_parallel_size": cp_size,
            "enable_nsa_prefill_context_parallel": True,
        }
    if group in ("pull", "collective", "sparse"):
        values |= {"enable_nsa_prefill_cp_shared_kv": True, "kv_read": group}
    if group == "auto on GPUs":
        values |= {"enable_nsa_prefill_cp_shared_kv": True, "device": "cuda"}
    return EngineConfig(**(values | changes))


def limits_of(
    engine_config: EngineConfig,
    spec: KVPoolSpec | None = None,
    context: int = MODEL_CONTEXT,
    free_bytes: int = 0,
) -> EngineLimits:
    spec = spec or pool_spec(engine_config.page_size)
    return resolve_limits(engine_config, spec, context, free_bytes=free_bytes)
