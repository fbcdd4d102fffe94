"""The flag through SGLang's own parser: where it survives, what is refused, what it sets."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import multiprocessing
import os
import pickle
from pathlib import Path

import pytest
from spawned import flag_in_child

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.integrations.sglang import ATTRIBUTE, FLAG
from cp_shared_kv.integrations.sglang.settings import ALL_RANKS_SEND, RUN_WITH_FLAG

pytestmark = pytest.mark.usefixtures("plugins_loaded", "sglang_on_a_gpu_host")


def _prefill(model_path: str, *more: str) -> list[str]:
    return [
        *("--model-path", model_path, "--device", "cuda", "--tp", "8"),
        *("--disaggregation-mode", "prefill", "--enable-nsa-prefill-context-parallel"),
        *("--nsa-prefill-cp-mode", "in-seq-split", FLAG, *more),
    ]


def _parse(argv: list[str]):
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(argv)


def test_the_plans_parser_test() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    raw_args = parser.parse_args(["--model-path", "dummy", FLAG])

    assert getattr(ServerArgs.from_cli_args(raw_args), ATTRIBUTE) is True


def test_without_the_flag_nothing_is_on_or_set(model_path: str, monkeypatch) -> None:
    monkeypatch.delenv(RUN_WITH_FLAG, raising=False)
    args = _parse([word for word in _prefill(model_path) if word != FLAG])

    assert getattr(args, ATTRIBUTE) is False
    assert not args.disable_cuda_graph
    assert RUN_WITH_FLAG not in os.environ


@pytest.mark.parametrize("split", ["in-seq-split", "round-robin-split"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_accepted_and_what_is_set(model_path: str, monkeypatch, split: str, dtype: str) -> None:
    monkeypatch.delenv(ALL_RANKS_SEND, raising=False)
    monkeypatch.delenv(RUN_WITH_FLAG, raising=False)
    args = _parse(
        _prefill(
            *(model_path, "--nsa-prefill-cp-mode", split, "--kv-cache-dtype", dtype),
            *("--nsa-prefill-backend", "flashmla_sparse"),
        )
    )

    assert getattr(args, ATTRIBUTE) is True
    assert args.disable_cuda_graph
    assert args.disable_piecewise_cuda_graph
    assert os.environ[ALL_RANKS_SEND] == "1"
    assert os.environ[RUN_WITH_FLAG] == "1"


def test_drafts_by_the_models_next_token_layer_are_accepted(model_path: str) -> None:
    args = _parse(_prefill(model_path, "--speculative-algorithm", "NEXTN"))

    assert args.speculative_algorithm == "EAGLE"
    assert args.speculative_draft_model_path == model_path


def test_a_draft_of_its_own_is_refused(model_path: str, tmp_path: Path) -> None:
    other = tmp_path / "draft"
    other.mkdir()
    (other / "config.json").write_text((Path(model_path) / "config.json").read_text())
    own = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(other)]

    with pytest.raises(ConfigError, match=f"--speculative-draft-model-path = {other}"):
        _parse(_prefill(model_path, *own))


def test_it_goes_wherever_server_args_go(model_path: str) -> None:
    args = _parse(_prefill(model_path))
    answers: multiprocessing.Queue[bool] = multiprocessing.get_context("spawn").Queue()
    child = multiprocessing.get_context("spawn").Process(
        target=flag_in_child, args=(pickle.dumps(args), answers)
    )
    child.start()
    in_child = answers.get(timeout=120)
    child.join()

    assert in_child is True
    assert getattr(pickle.loads(pickle.dumps(args)), ATTRIBUTE) is True
    assert getattr(copy.deepcopy(args), ATTRIBUTE) is True
    assert dataclasses.asdict(args)[ATTRIBUTE] is True
    dummy = type(args)(model_path="dummy", **{ATTRIBUTE: True})
    assert getattr(dataclasses.replace(dummy, tp_size=2), ATTRIBUTE) is True
    other = type(args)(model_path="dummy")
    assert getattr(dataclasses.replace(other, tp_size=2), ATTRIBUTE) is False


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--enable-hierarchical-cache"], "--enable-hierarchical-cache"),
        (["--enable-lmcache"], "--enable-lmcache"),
        (["--enable-mixed-chunk"], "--enable-mixed-chunk"),
        (["--enable-two-batch-overlap"], "--enable-two-batch-overlap"),
        (["--enable-memory-saver"], "--enable-memory-saver"),
        (["--disaggregation-transfer-backend", "nixl"], "--disaggregation-transfer-backend"),
        (["--nsa-prefill-backend", "fa3"], "--nsa-prefill-backend"),
        (["--nsa-prefill-backend", "trtllm"], "--nsa-prefill-backend"),
        (["--nsa-decode-backend", "trtllm"], "--nsa-decode-backend"),
        (["--kv-cache-dtype", "fp8_e4m3"], "--nsa-prefill-backend = flashmla_kv"),
    ],
)
def test_refused_with_the_setting_named(model_path: str, more: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _parse(_prefill(model_path, *more))


def test_servers_that_decode_are_refused(model_path: str) -> None:
    null = [
        word for word in _prefill(model_path) if word not in ("--disaggregation-mode", "prefill")
    ]
    decode = [
        "--model-path",
        model_path,
        "--device",
        "cuda",
        "--disaggregation-mode",
        "decode",
        FLAG,
    ]

    with pytest.raises(ConfigError, match="--disaggregation-mode = null"):
        _parse(null)
    with pytest.raises(ConfigError, match=f"{ALL_RANKS_SEND}=1 instead"):
        _parse(decode)


def test_all_reasons_come_at_once(model_path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _parse(
            _prefill(model_path, "--enable-lmcache", "--disaggregation-transfer-backend", "nixl")
        )

    assert "--enable-lmcache" in str(refused.value)
    assert "nixl" in str(refused.value)
