"""Loading a checkpoint's tokenizer, and what it adds to a prompt."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.server.app import create_app
from cp_shared_kv.server.tokenizer import Tokenizer
from cp_shared_kv.testing.fake_engine import DESCRIPTION

BOS, EOS = 256, 257


@pytest.fixture
def directory(model_directory: Path, tmp_path: Path) -> Path:
    shutil.copy(model_directory / "tokenizer.json", tmp_path)
    return tmp_path


def change(directory: Path, edit) -> None:
    path = str(directory / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    edit(backend)
    backend.save(path)


def configure(directory: Path, **config) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_text_survives_the_round_trip(tokenizer):
    text = "naïve € 你好 😀\n\x00"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_give_no_text(tokenizer):
    assert [i for i in range(259) if not tokenizer.has_text(i)] == [BOS, EOS, 258]
    assert tokenizer.decode([BOS, 104, 105, EOS]) == "hi"


def test_ids_that_the_tokenizer_lacks_give_no_text(tokenizer):
    assert tokenizer.decode([104, 100_000, 105]) == "hi"


def test_the_post_processors_tokens_are_added(directory):
    change(
        directory,
        lambda backend: setattr(
            backend,
            "post_processor",
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)]),
        ),
    )
    assert Tokenizer.from_directory(directory).encode("hi") == [BOS, 104, 105]


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>", "special": True}])
def test_add_bos_token_of_the_config_is_honoured_once(directory, token):
    configure(directory, add_bos_token=True, bos_token=token)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("hi") == [BOS, 104, 105]
    assert tokenizer.encode("<s>hi") == [BOS, 104, 105]


def test_a_bos_token_alone_adds_nothing(directory):
    configure(directory, bos_token="<s>", add_bos_token=False)
    assert Tokenizer.from_directory(directory).encode("hi") == [104, 105]


def test_truncation_and_padding_left_in_the_file_do_not_touch_prompts(directory):
    change(directory, lambda backend: backend.enable_truncation(4))
    change(directory, lambda backend: backend.enable_padding(length=64))
    assert len(Tokenizer.from_directory(directory).encode("x" * 10)) == 10


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json") as caught:
        Tokenizer.from_directory(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Nope"}}'])
def test_a_damaged_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        Tokenizer.from_directory(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize("content", ["{", '{"a":' + "[" * 100_000])
def test_a_damaged_config_is_named(directory, content):
    (directory / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is damaged"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("token", ["<nope>", None])
def test_a_bos_token_that_cannot_be_added_is_refused(directory, token):
    configure(directory, add_bos_token=True, bos_token=token)
    with pytest.raises(CheckpointError, match="bos_token"):
        Tokenizer.from_directory(directory)


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    description = replace(DESCRIPTION, vocab_size=100)
    with pytest.raises(CheckpointError, match="258 against vocab_size 100"):
        create_app(None, tokenizer, description)
