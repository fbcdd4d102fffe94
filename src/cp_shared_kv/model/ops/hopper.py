"""Production kernels on NVIDIA Hopper: DeepGEMM's index scores and FlashMLA's sparse attention.

Both are taken from what SGLang installs (`deep_gemm`, `sgl_kernel.flash_mla`), and only after a
call on this GPU has worked: DeepGEMM compiles its kernels, for which a machine may lack nvcc.
Everything else is that of `gpu_ops`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.ops import gpu
from cp_shared_kv.model.ops.interface import AttentionOps

CAPABILITY = (9, 0)
LEAST_QUERIES = 192
"""For DeepGEMM, where one multiprocessor takes two queries through all keys: its time is that of
256 queries for any fewer. Our kernel takes a third of it for 64, and more from about 200 on."""
INDEX_WIDTH, INDEX_HEADS = 128, (32, 64)
LATENT, ROPE = 512, 64
HEADS_AT_ONCE, SLOTS_AT_ONCE = 64, 128
"""FlashMLA takes multiples of these, so queries are padded with zeros and slots with -1."""
# What an import or a first call of compiled code raises where something is missing.
_FAILURES = (ImportError, OSError, RuntimeError, AssertionError, AttributeError, TypeError)

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class HopperOps:
    """The ops with all that could be had, what that is, and why the rest is not."""

    ops: AttentionOps
    used: tuple[str, ...]
    lacking: tuple[str, ...]


def lacking_for(model: ModelConfig) -> list[str]:
    """What keeps this model here from either library, without a look at the GPU."""
    return [reason for library in _LIBRARIES if (reason := library.lacking(model)) is not None]


def hopper_ops(model: ModelConfig, device: torch.device) -> HopperOps:
    """Load what there is, and try it on this GPU."""
    ops = gpu.gpu_ops(model, device)
    found = torch.cuda.get_device_capability(device)
    if found != CAPABILITY:
        return HopperOps(ops, (), (f"compute capability {found[0]}.{found[1]} is not 9.0",))
    used, lacking = list[str](), list[str]()
    for library in _LIBRARIES:
        reason = library.lacking(model)
        if reason is None:
            try:
                ops = library.added_to(ops, model, device)
                used.append(library.name)
                continue
            except _FAILURES as error:
                first_line = (str(error).splitlines() or [type(error).__name__])[0]
                reason = f"{library.name} does not run: {first_line}"
        lacking.append(reason)
    return HopperOps(ops, tuple(used), tuple(lacking))


def index_scores_fp8(
    kernel: Kernel,
    q: torch.Tensor,
    head_weights: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    """See AttentionOps, by deep_gemm.fp8_mqa_logits; of few queries by our own kernel."""
    if len(q) < LEAST_QUERIES:
        return gpu.index_scores_fp8(q, head_weights, codes, scales)
    # Here, since without a GPU there need not be a triton.
    from cp_shared_kv.kernels.quantise_queries import quantise_queries

    q_codes, weights = quantise_queries(q.contiguous(), head_weights.contiguous())
    queries, keys = (part.view(torch.float8_e4m3fn) for part in (q_codes, codes))
    first = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    last = torch.full_like(first, len(codes))
    # What is not cleaned lies past the last key, and is no part of what is returned.
    return kernel(queries, (keys, scales), weights, first, last, clean_logits=False)


def attend_rows(
    kernel: Kernel,
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See AttentionOps, by sgl_kernel.flash_mla.flash_mla_sparse_fwd."""
    heads, width = q_latent.shape[1:]
    q = torch.cat([q_latent, q_pe], dim=2)
    if missing := -heads % HEADS_AT_ONCE:
        q = functional.pad(q, (0, 0, 0, missing))
    missing = -slots.shape[1] % SLOTS_AT_ONCE
    indices = functional.pad(slots.int(), (0, missing), value=-1).unsqueeze(1)
    found = kernel(q=q, kv=rows.unsqueeze(1), indices=indices, sm_scale=scale, d_v=width)[0]
    return found[:, :heads]


@dataclass(frozen=True)
class _Library:
    name: str
    module: str
    unfit: Callable[[ModelConfig], str | None]
    added: Callable[[AttentionOps, Any, ModelConfig, torch.device], AttentionOps]

    def lacking(self, model: ModelConfig) -> str | None:
        """Why it cannot be used for a model; None as far as one can tell without a GPU."""
        if (unfit := self.unfit(model)) is not None:
            return unfit
        # The package alone: to look for a module in it would import it.
        package = self.module.partition(".")[0]
        return None if importlib.util.find_spec(package) else f"{package} is not installed"

    def added_to(self, ops: AttentionOps, model: ModelConfig, device: torch.device) -> AttentionOps:
        """The ops with this library's, after a call; raises whatever is wrong with it."""
        added = self.added(ops, importlib.import_module(self.module), model, device)
        torch.cuda.synchronize(device)
        return added


def _deep_gemm_unfit(model: ModelConfig) -> str | None:
    heads, width = model.index_n_heads, model.index_head_dim
    if width == INDEX_WIDTH and heads in INDEX_HEADS:
        return None
    return f"DeepGEMM takes 32 or 64 index heads of 128, not {heads} of {width}"


def _flash_mla_unfit(model: ModelConfig) -> str | None:
    widths = model.kv_lora_rank, model.qk_rope_head_dim
    if widths == (LATENT, ROPE):
        return None
    return f"FlashMLA takes rows of {LATENT} + {ROPE}, not {widths[0]} + {widths[1]}"


def _with_deep_gemm(
    ops: AttentionOps, module: Any, model: ModelConfig, device: torch.device
) -> AttentionOps:
    scores = partial(index_scores_fp8, module.fp8_mqa_logits)
    q = torch.zeros(LEAST_QUERIES, model.index_n_heads, INDEX_WIDTH, device=device).bfloat16()
    codes = torch.zeros(SLOTS_AT_ONCE, INDEX_WIDTH, dtype=torch.uint8, device=device)
    scores(q, q[:, :, 0].float(), codes, torch.ones(len(codes), device=device))
    return replace(ops, index_scores_fp8=scores)


def _with_flash_mla(
    ops: AttentionOps, module: Any, model: ModelConfig, device: torch.device
) -> AttentionOps:
    attend = partial(attend_rows, module.flash_mla_sparse_fwd)
    q = torch.zeros(1, model.num_attention_heads, LATENT, device=device).bfloat16()
    rows = torch.zeros(1, LATENT + ROPE, device=device).bfloat16()
    slots = torch.zeros(1, 1, dtype=torch.int64, device=device)
    attend(q, q[:, :, :ROPE], rows, slots, 1.0)
    return replace(ops, attend_rows=attend)


_LIBRARIES = (
    _Library("DeepGEMM for index scores", "deep_gemm", _deep_gemm_unfit, _with_deep_gemm),
    _Library(
        "FlashMLA for sparse attention", "sgl_kernel.flash_mla", _flash_mla_unfit, _with_flash_mla
    ),
)
