"""The tiny checkpoints: seeded, complete, remade when damaged; one token a byte."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from cp_shared_kv.demo_model.byte_tokenizer import END_TOKEN, byte_tokenizer
from cp_shared_kv.demo_model.cache import demo_checkpoint_directory, model_directory
from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.errors import ConfigError
from cp_shared_kv.model.transformer import Transformer

LICENSE = Path(__file__).parents[2] / "LICENSE"
TOKENIZER = byte_tokenizer()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_round_trips_at_one_token_a_byte(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    if END_TOKEN not in text:
        assert ids == list(text.encode())
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_the_end_token_is_one_token_and_special() -> None:
    assert TOKENIZER.encode(f"a{END_TOKEN}").ids == [97, 256]
    assert TOKENIZER.decode([97, 256]) == "a"


def test_the_licence_is_as_many_tokens_as_bytes(cache: Path) -> None:
    text = LICENSE.read_text(encoding="utf-8")
    saved = Tokenizer.from_file(str(demo_checkpoint_directory() / "tokenizer.json"))
    ids = saved.encode(text).ids
    assert len(ids) == LICENSE.stat().st_size == 11358
    assert saved.decode(ids) == text


def test_the_demo_model_takes_the_licence_and_loads(cache: Path) -> None:
    config = Transformer.load(demo_checkpoint_directory()).config
    assert config.context_length >= 16384
    assert (config.num_hidden_layers, config.index_n_heads, config.index_head_dim) == (2, 8, 32)
    assert config.index_topk == 64
    assert config.sparse_mlp_layers == (False, True)
    assert config.rope.yarn is not None
    assert config.eos_token_ids == (256,)


def test_the_same_seed_gives_the_same_tensors(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_checkpoint(tmp_path / name, ModelShape(), seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a)


def test_no_tensor_hides_a_mistake(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", ModelShape(), seed=0)
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        assert tensor.std() > 0.01, name
        assert not bool((tensor == 0).any() or (tensor == 1).any()), name


def test_the_demo_is_made_once(cache: Path) -> None:
    first = demo_checkpoint_directory()
    made = (first / "model.safetensors").stat().st_ino
    assert demo_checkpoint_directory() == first
    assert (first / "model.safetensors").stat().st_ino == made
    assert str(first).startswith(str(cache))


def test_demo_names_the_demo_model_where_nothing_else_has_that_name(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_directory(Path("demo")) == demo_checkpoint_directory()
    for other in (Path("models/demo"), Path("./demo2"), Path("/models/tiny")):
        assert model_directory(other) == other
    (tmp_path / "demo").mkdir()
    assert model_directory(Path("demo")) == Path("demo")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove", "change"])
def test_a_damaged_demo_is_remade(cache: Path, file: str, damage: str) -> None:
    path = demo_checkpoint_directory() / file
    whole = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(whole[:-2] + b"\0\0")
    assert demo_checkpoint_directory() == path.parent
    assert path.read_bytes() == whole


def test_a_checkpoint_appears_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    directory = tmp_path / "models" / "tiny"
    for _ in range(2):
        make_tiny_checkpoint(directory, ModelShape(), seed=0)
        assert [path.name for path in directory.parent.iterdir()] == ["tiny"]
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 256


def test_several_may_make_the_demo_at_once(cache: Path) -> None:
    failures: list[BaseException] = []

    def make() -> None:
        try:
            for _ in range(3):
                Transformer.load(demo_checkpoint_directory())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("place", ["/proc/cache", "/dev/null"])
def test_a_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    with pytest.raises(ConfigError, match=f"{place}.*; to change it: set XDG_CACHE_HOME"):
        demo_checkpoint_directory()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", place)
    with pytest.raises(ConfigError, match=f"{place}.*; to change it: set XDG_CACHE_HOME"):
        demo_checkpoint_directory()
