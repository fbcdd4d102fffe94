"""Loading: a damaged or mismatched checkpoint is refused by tensor, file and shapes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cp_shared_kv.demo_model.shapes import GlmModelShape, ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.tensor_shapes import tensor_shapes
from cp_shared_kv.model.weights import ModelWeights, MoEWeights, load_weights

WK = "model.layers.1.self_attn.indexer.wk.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights") / "model"
    make_tiny_checkpoint(directory, ModelShape(), seed=0)
    return directory


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def load(directory: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(directory, ModelConfig.from_directory(directory), dtype)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def shard(directory: Path) -> dict[str, str]:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_tensors_arrive_where_their_names_say(checkpoint: Path) -> None:
    stored, loaded = load_file(checkpoint / "model.safetensors"), load(checkpoint)
    moe = loaded.layers[1].mlp
    assert isinstance(moe, MoEWeights)
    up = stored["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert torch.equal(moe.gate_up_proj[3, len(up) :], up)
    assert torch.equal(moe.down_proj[7], stored["model.layers.1.mlp.experts.7.down_proj.weight"])
    attention = loaded.layers[0].attention
    kv_b = stored["model.layers.0.self_attn.kv_b_proj.weight"]
    assert torch.equal(torch.cat([attention.key_up, attention.value_up], 1).flatten(0, 1), kv_b)
    assert loaded.layers[1].attention.indexer is not None
    assert torch.equal(loaded.layers[1].attention.indexer.k_proj, stored[WK])


def test_a_layer_that_shares_a_selection_has_no_indexer_weights(tmp_path: Path) -> None:
    shape = GlmModelShape(num_hidden_layers=3, indexer={"index_topk_pattern": "FSF"})
    make_tiny_checkpoint(tmp_path / "model", shape, seed=0)
    has_indexer = [layer.attention.indexer is not None for layer in load(tmp_path / "model").layers]
    assert has_indexer == [True, False, True]
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert not any("layers.1.self_attn.indexer" in name for name in stored)
    rewrite(tmp_path / "model", **{WK: torch.ones(32, 128)})
    with pytest.raises(CheckpointError, match=WK):
        load(tmp_path / "model")


def test_bf16_keeps_what_chooses_in_fp32(checkpoint: Path) -> None:
    loaded = load(checkpoint, torch.bfloat16)
    moe, indexer = loaded.layers[1].mlp, loaded.layers[1].attention.indexer
    assert isinstance(moe, MoEWeights)
    assert indexer is not None
    assert loaded.embedding.dtype == moe.gate_up_proj.dtype == indexer.q_proj.dtype
    assert loaded.embedding.dtype == torch.bfloat16
    assert moe.router.dtype == moe.correction_bias.dtype == torch.float32
    assert indexer.head_proj.dtype == indexer.k_norm_bias.dtype == torch.float32


def test_loaded_weights_outlive_their_file(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    before = loaded.embedding.clone()
    path = checkpoint / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(loaded.embedding, before)


def test_shards_load_as_one_file_does(checkpoint: Path, pristine: Path) -> None:
    shard(checkpoint)
    assert torch.equal(load(checkpoint).lm_head, load(pristine).lm_head)


def test_multi_token_prediction_layers_are_skipped(checkpoint: Path) -> None:
    extra = {"model.layers.2.enorm.weight": torch.ones(128)}
    rewrite(checkpoint, **extra)
    with pytest.raises(CheckpointError, match=r"layers\.2\.enorm"):
        load(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert len(load(checkpoint).layers) == 2
    del config["num_nextn_predict_layers"]  # a checkpoint with such a layer need not say so
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert len(load(checkpoint).layers) == 2


def test_a_missing_tensor_is_named_with_file_and_shape(checkpoint: Path) -> None:
    rewrite(checkpoint, **{WK: None})
    with pytest.raises(CheckpointError) as refused:
        load(checkpoint)
    message = str(refused.value)
    assert WK in message
    assert str(checkpoint) in message
    assert "model.safetensors" in message
    assert "[32, 128]" in message


def test_a_wrong_shape_names_tensor_file_and_both_shapes(checkpoint: Path) -> None:
    rewrite(checkpoint, **{WK: torch.ones(16, 128)})
    with pytest.raises(CheckpointError) as refused:
        load(checkpoint)
    for part in (WK, str(checkpoint / "model.safetensors"), "[16, 128]", "[32, 128]"):
        assert part in str(refused.value)


def test_a_wrong_dtype_is_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, **{WK: torch.ones(32, 128).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        load(checkpoint)


def test_a_tensor_of_another_model_is_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, **{"model.layers.0.self_attn.q_a_proj.bias": torch.ones(64)})
    with pytest.raises(CheckpointError, match=r"q_a_proj\.bias"):
        load(checkpoint)


@pytest.mark.parametrize("kept_share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused_with_its_size(checkpoint: Path, kept_share: float) -> None:
    path = checkpoint / "model.safetensors"
    whole_bytes = path.stat().st_size
    kept_bytes = int(whole_bytes * kept_share)
    with path.open("r+b") as file:
        file.truncate(kept_bytes)
    with pytest.raises(CheckpointError) as refused:
        load(checkpoint)
    assert str(path) in str(refused.value)
    assert f"{kept_bytes} bytes" in str(refused.value)
    if kept_share >= 0.5:
        assert f"the whole file has {whole_bytes}" in str(refused.value)
        assert "tensor " in str(refused.value)


@pytest.mark.parametrize("end", ["1e999", "Infinity", "NaN", "-1", '"x"'])
def test_a_header_with_an_end_that_is_none_is_refused(checkpoint: Path, end: str) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,%s]}}' % end.encode()
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load(checkpoint)


def test_garbage_instead_of_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0[1, 2, 3]       ")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(checkpoint)


def test_a_directory_without_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no model weights"):
        load(checkpoint)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        load(checkpoint)


def test_an_index_that_contradicts_its_shards_is_refused(checkpoint: Path) -> None:
    weight_map = shard(checkpoint)
    other = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}
    write_index(checkpoint, {**weight_map, WK: other[weight_map[WK]]})
    with pytest.raises(CheckpointError, match=r"indexer\.wk"):
        load(checkpoint)


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/passwd", "..", 3, None])
def test_an_index_cannot_lead_out_of_the_directory(checkpoint: Path, file: object) -> None:
    write_index(checkpoint, {**shard(checkpoint), WK: file})
    with pytest.raises(CheckpointError):
        load(checkpoint)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', '{"weight_map": 3}'])
def test_a_broken_index_is_refused(checkpoint: Path, content: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(checkpoint)


@pytest.mark.timeout(20)
def test_an_index_that_is_a_pipe_is_refused_and_not_waited_for(checkpoint: Path) -> None:
    os.mkfifo(checkpoint / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"index\.json is no regular file"):
        load(checkpoint)


def test_the_names_do_not_depend_on_what_is_in_the_file(checkpoint: Path) -> None:
    config = ModelConfig.from_directory(checkpoint)
    assert set(tensor_shapes(config)) == set(load_file(checkpoint / "model.safetensors"))
    deeper = dataclasses.replace(
        config,
        num_hidden_layers=3,
        sparse_mlp_layers=(False, True, True),
        full_indexer_layers=(True, True, True),
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.2"):
        load_weights(checkpoint, deeper, torch.float32)
