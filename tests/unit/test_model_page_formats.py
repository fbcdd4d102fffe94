"""The model over each page format: as good as its rounding, and no worse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.engine.config_values import KVCacheDtype
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.testing.model_on_ranks import ScheduleRun
from cp_shared_kv.testing.schedule import PlannedRequest, Schedule, in_chunks

PAGE_SIZE = 16
TOKENS = 60  # no more than index_topk: rounding cannot change what is selected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide") / "model"
    # Tame layers, so that the experts chosen stay the same.
    shape = ModelShape(kv_lora_rank=256, index_head_dim=128, branch_scale=0.1)
    make_tiny_checkpoint(directory, shape, seed=3)
    return directory


@torch.inference_mode()
def logits(checkpoint: Path, kv_cache_dtype: KVCacheDtype, dtype: torch.dtype) -> torch.Tensor:
    transformer = Transformer.load(checkpoint, dtype)
    request = PlannedRequest(np.random.default_rng(0).integers(0, 256, TOKENS).tolist())
    # The later chunks read rounded values of the first ones.
    schedule = Schedule(PAGE_SIZE, [request], in_chunks(0, 0, [25], TOKENS))
    run = ScheduleRun(transformer, SoloGroup(), schedule, "in-seq-split", kv_cache_dtype)
    hidden = [run.forward(batch)[0] for batch in schedule.batches]
    return transformer.logits(torch.cat(hidden))


def relative_error(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found - reference).norm() / reference.norm())


def test_the_coarser_the_format_the_further_the_logits_but_never_far(checkpoint: Path) -> None:
    exact = logits(checkpoint, "fp32", torch.float32)
    of_bf16 = relative_error(logits(checkpoint, "bf16", torch.float32), exact)
    of_fp8 = relative_error(logits(checkpoint, "fp8_e4m3", torch.float32), exact)
    # Branches of a tenth damp the roundings, which are 2^-9 and 2^-4 at most.
    assert 0 < of_bf16 < 0.2 * 2.0**-8
    assert of_bf16 < of_fp8 < 0.2 * 2.0**-4


@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "bf16", "fp8_e4m3"])
def test_a_bf16_model_runs_on_every_format(checkpoint: Path, kv_cache_dtype: KVCacheDtype) -> None:
    exact = logits(checkpoint, "fp32", torch.float32)
    found = logits(checkpoint, kv_cache_dtype, torch.bfloat16)
    assert found.dtype == torch.float32
    assert relative_error(found, exact) < 0.02  # a few roundings of the residual stream


def test_pages_of_bf16_lose_nothing_that_a_bf16_model_computes(checkpoint: Path) -> None:
    in_fp32 = logits(checkpoint, "fp32", torch.bfloat16)
    # The index keys differ, in fp8 here; with everything selected they do not matter.
    assert torch.equal(logits(checkpoint, "bf16", torch.bfloat16), in_fp32)
