"""Block-fp8 weights against transformers, which dequantises them too.

It (5.24) takes a matrix to be cut into equal blocks: 192 rows with two rows of scales are two
blocks of 96 to it, where checkpoints mean 128 and 64. So models with cut blocks are compared on a
copy that is dequantised here, value by value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cp_shared_kv.demo_model.shapes import GlmModelShape, ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.model.weights import MLPWeights, load_weights
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.testing.model_on_ranks import compute
from cp_shared_kv.testing.oracle_cases import GLM_FREQUENCY, ORACLE_SIZES, prompt
from cp_shared_kv.testing.recording_ops import RecordedSelections
from cp_shared_kv.testing.routing_margin import SURE_ROUTING_MARGIN
from cp_shared_kv.testing.schedule import PlannedRequest, Schedule, Span
from cp_shared_kv.testing.transformers_oracle import TransformersOracle

WHOLE_BLOCKS = ["deepseek_v32, block fp8", "glm_moe_dsa, block fp8"]
TOKENS = prompt(7, 150)
SCHEDULE = Schedule(16, [PlannedRequest(TOKENS)], [[Span(0, 0, 90)], [Span(0, 90, 150)]])
RELATIVE_ERROR = 2e-6

# Cut at the lower edge, at the right, at both: 160 columns of q_a_proj, 192 rows of q_b_proj, 160
# rows of kv_a_proj, 320 rows and 144 columns of kv_b_proj, 200 rows of gate_proj.
CUT: dict[str, Any] = {
    **ORACLE_SIZES,
    "hidden_size": 160,
    "kv_lora_rank": 144,
    "v_head_dim": 48,
    "intermediate_size": 200,
    "block_fp8": True,
}
CUT_SHAPES = {
    "deepseek_v32": ModelShape(**CUT),
    "glm_moe_dsa": GlmModelShape(**CUT, indexer=GLM_FREQUENCY),
}


@pytest.mark.parametrize("model", WHOLE_BLOCKS, indirect=True)
def test_weights_are_those_that_transformers_dequantises(model: Any) -> None:
    config = ModelConfig.from_directory(model.checkpoint)
    weights = load_weights(model.checkpoint, config, torch.float32)
    for layer, theirs in zip(weights.layers, model.oracle.layers, strict=True):
        ours, attention = layer.attention, theirs.self_attn
        assert torch.equal(ours.q_a_proj, attention.q_a_proj.weight)
        assert torch.equal(ours.q_b_proj, attention.q_b_proj.weight)
        assert torch.equal(ours.kv_a_proj, attention.kv_a_proj_with_mqa.weight)
        kv_b = torch.cat([ours.key_up, ours.value_up], dim=1).flatten(0, 1)
        assert torch.equal(kv_b, attention.kv_b_proj.weight)
        assert torch.equal(ours.o_proj, attention.o_proj.weight)
        assert (ours.indexer is None) == (attention.indexer is None)
        if ours.indexer is not None:
            assert torch.equal(ours.indexer.q_proj, attention.indexer.wq_b.weight)
            assert torch.equal(ours.indexer.k_proj, attention.indexer.wk.weight)
        if isinstance(layer.mlp, MLPWeights):
            gate_up = torch.cat([theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight])
            assert torch.equal(layer.mlp.gate_up_proj, gate_up)
        else:
            assert torch.equal(layer.mlp.gate_up_proj, theirs.mlp.experts.gate_up_proj)
            assert torch.equal(layer.mlp.down_proj, theirs.mlp.experts.down_proj)


def dequantised_copy(checkpoint: Path, copy: Path) -> None:
    """The same model in fp32, each value times the scale of its block, looked up one by one."""
    stored = load_file(checkpoint / "model.safetensors")
    for name in [name for name in stored if f"{name}_scale_inv" in stored]:
        weight, scale = stored[name].float(), stored.pop(f"{name}_scale_inv")
        rows, columns = torch.meshgrid(*map(torch.arange, weight.shape), indexing="ij")
        stored[name] = weight * scale[rows // 128, columns // 128]
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    copy.mkdir()
    save_file(stored, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("architecture", CUT_SHAPES)
def test_cut_blocks_agree_with_transformers_on_a_dequantised_copy(
    architecture: str, tmp_path: Path
) -> None:
    make_tiny_checkpoint(tmp_path / "fp8", CUT_SHAPES[architecture], seed=0)
    dequantised_copy(tmp_path / "fp8", tmp_path / "fp32")
    recorded = RecordedSelections()
    transformer = Transformer.load(tmp_path / "fp8", ops=recorded.ops)
    computed = compute(transformer, recorded, SoloGroup(), SCHEDULE, "in-seq-split")
    agreement = TransformersOracle(tmp_path / "fp32").compare(computed, [TOKENS])
    assert agreement.least_routing_margin > SURE_ROUTING_MARGIN, agreement
    assert agreement.relative_error <= RELATIVE_ERROR, agreement
    assert agreement.sure_rows_agreeing == agreement.sure_rows, agreement
    assert agreement.greedy_agreeing == agreement.rows == len(TOKENS), agreement
