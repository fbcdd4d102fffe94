"""Which ops run, what cannot run and why, and how the Hopper libraries are called."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.model_spec import describe_model
from cp_shared_kv.errors import ConfigError
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.ops import hopper
from cp_shared_kv.model.ops.choice import check_choice, ops_for
from cp_shared_kv.model.ops.names import AttentionOpsName
from cp_shared_kv.model.ops.reference import REFERENCE_OPS, sparse_attention

CPU = torch.device("cpu")
MODEL = ModelConfig.from_dict(
    ModelShape(
        num_attention_heads=4,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_n_heads=32,
        index_head_dim=128,
    ).config()
)


@pytest.mark.parametrize("choice", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_computes_in_torch(choice: AttentionOpsName, dtype: torch.dtype) -> None:
    name, ops = ops_for(choice, CPU, dtype, MODEL)
    assert name == f"plain torch in {str(dtype).removeprefix('torch.')}"
    assert ops is REFERENCE_OPS


@pytest.mark.parametrize("choice", ["triton", "hopper"])
def test_kernels_compute_in_bfloat16_alone(choice: AttentionOpsName) -> None:
    with pytest.raises(
        ConfigError, match=f"--attention-ops {choice} computes in bfloat16.*float32"
    ):
        check_choice(choice, torch.float32, MODEL)


@pytest.mark.parametrize(
    ("widths", "reason"),
    [
        ({"index_n_heads": 5}, "DeepGEMM takes 32 or 64 index heads of 128, not 5 of 128"),
        ({"index_head_dim": 64}, "DeepGEMM takes 32 or 64 index heads of 128, not 32 of 64"),
        ({"kv_lora_rank": 256}, r"FlashMLA takes rows of 512 \+ 64, not 256 \+ 64"),
        ({}, "deep_gemm is not installed; sgl_kernel is not installed"),
    ],
)
def test_hopper_is_refused_with_the_reason(
    widths: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"hopper cannot run here: .*{reason}"):
        check_choice("hopper", torch.bfloat16, dataclasses.replace(MODEL, **widths))


def test_a_choice_that_cannot_run_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", ModelShape(), seed=0)
    flags: dict[str, Any] = {"model_path": tmp_path / "model", "attention_ops": "hopper"}
    with pytest.raises(ConfigError, match="--attention-ops hopper is for GPUs: --device cpu"):
        EngineConfig(**flags)
    with pytest.raises(ConfigError, match="hopper computes in bfloat16, and the model in: float32"):
        describe_model(EngineConfig(**flags, device="cuda"))


@pytest.mark.parametrize(("heads", "chosen"), [(4, 3), (64, 128), (128, 130), (80, 1)])
def test_flash_mla_gets_whole_tiles_of_heads_and_slots(heads: int, chosen: int) -> None:
    calls: list[tuple[torch.Size, torch.Size]] = []

    def flash_mla_sparse_fwd(
        *, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int
    ) -> tuple[torch.Tensor]:
        calls.append((q.shape, indices.shape))
        assert (q.is_contiguous(), indices.dtype, kv.shape[1:]) == (True, torch.int32, (1, 576))
        slots = indices.squeeze(1).long()
        rows = kv.squeeze(1)[slots.clamp(min=0)]
        parts = q[..., :d_v], q[..., d_v:], rows[..., :d_v], rows[..., d_v:]
        return (sparse_attention(*parts, slots >= 0, sm_scale),)

    generator = torch.Generator().manual_seed(heads)
    # By heads first, as the absorbed queries come out of their product.
    q_latent = torch.randn(heads, 2, 512, generator=generator).transpose(0, 1)
    q_pe = torch.randn(2, heads, 64, generator=generator)
    rows = torch.randn(140, 576, generator=generator)
    slots = torch.stack([torch.randperm(140, generator=generator)[:chosen] for _ in range(2)])
    slots[1, 1:] = -1
    got = hopper.attend_rows(flash_mla_sparse_fwd, q_latent, q_pe, rows, slots, 0.1)
    gathered = rows[slots.clamp(min=0)]
    expected = sparse_attention(
        q_latent, q_pe, gathered[..., :512], gathered[..., 512:], slots >= 0, 0.1
    )
    torch.testing.assert_close(got, expected)
    padded = -(-heads // 64) * 64
    assert calls == [((2, padded, 576), (2, 1, -(-chosen // 128) * 128))]
