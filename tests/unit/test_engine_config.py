"""Every rule of the config: what is refused, and that the message says flag, value and way out."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.config_values import MAX_PAGE_SIZE, flag
from cp_shared_kv.errors import ConfigError

SHARED: dict[str, Any] = {
    "attention_context_parallel_size": 4,
    "enable_nsa_prefill_context_parallel": True,
    "enable_nsa_prefill_cp_shared_kv": True,
}
REPLICATED = SHARED | {"enable_nsa_prefill_cp_shared_kv": False}


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**({"model_path": Path("/models/tiny")} | changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        config(**changes)
    return str(refused.value)


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("dtype", "auto, float32, bfloat16"),
        ("nsa_prefill_cp_mode", "in-seq-split, round-robin-split"),
        ("kv_read", "auto, pull, push, collective, sparse"),
        ("device", "cpu, cuda"),
        ("disaggregation_transfer_backend", "shared_memory, mooncake"),
        ("log_level", "debug, info, warning, error"),
    ],
)
def test_an_unknown_choice_is_refused_with_flag_value_and_choices(field: str, allowed: str) -> None:
    message = refusal(**{field: "fancy"})
    assert flag(field) in message
    assert ": fancy;" in message
    assert f"allowed: {allowed}" in message


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("port", 0, 65535),
        ("page_size", 1, 1024),
        ("context_length", 2, 2**20),
        ("chunked_prefill_size", 1, 2**20),
        ("max_total_tokens", 64, 2**40),
        ("decode_max_total_tokens", 64, 2**40),
        ("max_running_requests", 1, 4096),
    ],
)
def test_the_ends_of_a_range_are_allowed_and_what_lies_past_them_is_refused(
    field: str, least: int, most: int
) -> None:
    for value in (least, most):
        assert getattr(config(**{field: value}), field) == value
    for value in (least - 1, most + 1, -1):
        message = refusal(**{field: value})
        assert flag(field) in message
        assert f": {value};" in message
        assert "allowed: " in message


@pytest.mark.parametrize("size", [0, 65, -4])
def test_a_group_of_an_impossible_size_is_refused(size: int) -> None:
    message = refusal(**(SHARED | {"attention_context_parallel_size": size}))
    assert "--attention-context-parallel-size is out of range" in message
    assert f": {size};" in message
    assert "allowed: 1 to 64" in message


def test_a_page_size_that_is_no_power_of_two_is_refused() -> None:
    message = refusal(page_size=48)
    assert "--page-size" in message
    assert ": 48;" in message
    assert f"allowed: 1, 2, 4 ... {MAX_PAGE_SIZE}" in message


@pytest.mark.parametrize("field", ["max_total_tokens", "decode_max_total_tokens"])
def test_a_pool_of_less_than_one_page_is_refused(field: str) -> None:
    message = refusal(**{field: 127, "page_size": 128})
    assert f"{flag(field)} is less than one page" in message
    assert ": 127;" in message
    assert "allowed: at least --page-size 128" in message


def test_an_empty_host_is_refused() -> None:
    message = refusal(host="")
    assert "--host" in message
    assert "127.0.0.1" in message


def test_several_ranks_without_context_parallelism_are_refused() -> None:
    message = refusal(attention_context_parallel_size=4)
    assert "--attention-context-parallel-size 4" in message
    assert "add --enable-nsa-prefill-context-parallel" in message


def test_context_parallelism_of_one_rank_is_refused() -> None:
    message = refusal(enable_nsa_prefill_context_parallel=True)
    assert "--enable-nsa-prefill-context-parallel" in message
    assert "--attention-context-parallel-size 1" in message
    assert "allowed: 2 or more ranks" in message


def test_shared_kv_without_a_group_is_refused() -> None:
    message = refusal(enable_nsa_prefill_cp_shared_kv=True)
    assert "--enable-nsa-prefill-cp-shared-kv" in message
    assert "add --enable-nsa-prefill-context-parallel" in message
    assert "--attention-context-parallel-size 2" in message


@pytest.mark.parametrize("kv_read", ["pull", "collective", "sparse"])
@pytest.mark.parametrize("group", [{}, REPLICATED])
def test_a_read_path_where_nothing_is_shared_is_refused(
    kv_read: str, group: dict[str, Any]
) -> None:
    message = refusal(kv_read=kv_read, **group)
    assert "--kv-read" in message
    assert f": {kv_read};" in message
    assert "allowed: auto" in message
    assert "--enable-nsa-prefill-cp-shared-kv" in message


@pytest.mark.parametrize("kv_read", ["auto", "pull", "collective"])
def test_a_bound_for_what_is_read_in_blocks_needs_a_read_in_blocks(kv_read: str) -> None:
    message = refusal(**SHARED, kv_read=kv_read, kv_scratch_tokens=2048)
    assert "--kv-scratch-tokens bounds what is read in blocks, and whole prefixes are read: " in (
        message
    )
    assert "add --kv-read sparse" in message


def test_auto_between_gpus_may_read_in_blocks() -> None:
    config(**SHARED, device="cuda", kv_read="auto", kv_scratch_tokens=2048)
    for kv_read in ("pull", "push", "collective"):
        message = refusal(**SHARED, device="cuda", kv_read=kv_read, kv_scratch_tokens=2048)
        assert "or auto between GPUs" in message


def test_scratch_holds_at_least_one_piece() -> None:
    message = refusal(**SHARED, kv_read="sparse", kv_scratch_tokens=1023)
    assert "--kv-scratch-tokens is out of range: 1023; allowed: 1024 to" in message


def test_another_system_is_refused_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    message = refusal(page_size=0)
    assert "Linux only: darwin" in message
    assert "--page-size" not in message


@pytest.mark.parametrize(
    ("changes", "resolved"),
    [
        ({}, "local"),
        (REPLICATED, "local"),
        (SHARED, "pull"),
        (SHARED | {"kv_read": "pull"}, "pull"),
        (SHARED | {"kv_read": "collective"}, "collective"),
        (SHARED | {"kv_read": "sparse"}, "sparse"),
    ],
)
def test_the_read_path_follows_from_what_is_shared(changes: dict[str, Any], resolved: str) -> None:
    assert config(**changes).resolved_kv_read == resolved


def test_a_config_comes_back_from_plain_json() -> None:
    built = config(
        **SHARED, kv_read="collective", record_batches=Path("/tmp/r"), max_total_tokens=640
    )
    plain = json.loads(json.dumps(built.as_plain()))
    assert set(plain) == {f.name for f in fields(EngineConfig)}
    assert EngineConfig.from_plain(plain) == built
    assert EngineConfig.from_plain(config().as_plain()) == config()


def test_what_comes_back_from_plain_is_checked_again() -> None:
    plain = config(**SHARED).as_plain() | {"enable_nsa_prefill_context_parallel": False}
    with pytest.raises(ConfigError, match="need prefill context parallelism"):
        EngineConfig.from_plain(plain)


def test_the_model_is_named_after_its_directory_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert config().model_name == "tiny"
    assert config(served_model_name="mine").model_name == "mine"
    inside = tmp_path / "GLM" / "weights"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert config(model_path=Path(".")).model_name == "weights"
    assert config(model_path=Path("..")).model_name == "GLM"
