"""What a run tells a satellite: all that it needs, no secret; what a satellite believes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cp_shared_kv.engine.codecs import TO_SATELLITE
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.join_config import JoinConfig
from cp_shared_kv.engine.model_spec import describe_model
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.satellite_messages import Terms
from cp_shared_kv.engine.sizing import resolve_limits
from cp_shared_kv.engine.terms import joined_spec, terms_of
from cp_shared_kv.errors import CheckpointError, ConfigError, ProtocolError
from cp_shared_kv.testing.running_cluster import small_config

SECRET = "very-secret-word"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cluster")
    ControlKeys.create(directory)
    return directory


@pytest.fixture(scope="module")
def spec(keys: Path) -> RunSpec:
    """A run that satellites may join."""
    config = small_config(
        disaggregation_transfer_backend="mooncake",
        control_host="10.0.0.5",
        control_keys=keys,
        api_key=SECRET,
    )
    model = describe_model(config)
    return RunSpec(
        run_id="12345678",
        run_dir="/run/main",
        supervisor_pid=1,
        config=config.as_plain(),
        limits=resolve_limits(config, model.pool_spec, model.context_length, free_bytes=1 << 30),
        page_layout=model.page_layout,
        model_fingerprint=model.fingerprint,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
    )


@pytest.fixture
def terms(spec: RunSpec) -> Terms:
    """As they arrive."""
    told = TO_SATELLITE.decode(TO_SATELLITE.encode(terms_of(spec, ("decode-1.1", "decode-2.1"))))
    assert isinstance(told, Terms)
    return told


@pytest.fixture
def agree(terms: Terms, keys: Path, tmp_path: Path) -> Callable[..., RunSpec]:
    def make(model_path: Path | None = None, **changes: Any) -> RunSpec:
        return joined_spec(
            msgspec.structs.replace(terms, **changes),
            run_dir=tmp_path,
            model_path=model_path,
            host="10.0.0.6",
            keys=keys,
        )

    return make


def test_no_secret_is_told(spec: RunSpec, keys: Path) -> None:
    data = TO_SATELLITE.encode(terms_of(spec, ("decode-1.1",)))
    assert SECRET.encode() not in data
    assert str(keys).encode() not in data


def test_a_satellite_runs_by_the_terms_under_names_of_its_own(
    spec: RunSpec, agree: Callable[..., RunSpec], tmp_path: Path
) -> None:
    made = agree()
    assert made.joined
    assert made.limits == spec.limits
    assert made.hello(role="decode", epoch=1, session_id="x", physical_pages=2).page_size == 64
    assert made.run_id != spec.run_id  # what it names in /dev/shm is its own to remove
    assert made.run_dir == str(tmp_path)
    ours, theirs = made.engine_config(), spec.engine_config()
    assert (ours.control_host, ours.decode_workers, ours.api_key) == ("10.0.0.6", 2, None)
    local = ("control_host", "control_keys", "decode_workers", "api_key", "port")
    same = {name: getattr(theirs, name) for name in local}
    assert replace(ours, **same) == theirs


def test_another_model_is_refused_with_both_fingerprints(
    spec: RunSpec, agree: Callable[..., RunSpec], tmp_path: Path
) -> None:
    other = tmp_path / "model"
    shutil.copytree(spec.engine_config().model_path, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    with pytest.raises(CheckpointError, match=f"{other}.*{spec.model_fingerprint}.*--model-path"):
        agree(other)


def test_a_model_that_is_not_there_is_named(agree: Callable[..., RunSpec], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"not on this host: {tmp_path}/none.*--model-path"):
        agree(tmp_path / "none")


def test_the_same_model_may_lie_elsewhere(
    spec: RunSpec, agree: Callable[..., RunSpec], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(spec.engine_config().model_path, copy)
    assert agree(copy).engine_config().model_path == copy


def test_terms_that_contradict_themselves_are_refused(
    spec: RunSpec, agree: Callable[..., RunSpec], terms: Terms
) -> None:
    with pytest.raises(ProtocolError, match="sizes are not those of its config"):
        agree(limits=msgspec.structs.replace(spec.limits, page_size=32))
    with pytest.raises(CheckpointError, match="not that of the run"):
        agree(page_layout=msgspec.structs.replace(spec.page_layout, bytes_per_page=1))
    for settings in ({"surprise": 1}, {"page_size": "64"}, {"page_size": None}):
        with pytest.raises(ProtocolError, match="config cannot be read"):
            agree(config=terms.config | settings)
    with pytest.raises(ConfigError, match="--page-size"):
        agree(config=terms.config | {"page_size": 48})


def test_settings_of_this_host_are_not_for_the_run_to_choose(
    agree: Callable[..., RunSpec], terms: Terms
) -> None:
    theirs = {"record_batches": "/etc", "control_host": "10.9.9.9", "control_keys": "/theirs"}
    config = agree(config=terms.config | theirs).engine_config()
    assert (config.record_batches, config.control_host) == (None, "10.0.0.6")


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "10.0.0.5"},
        {"address": ":30001"},
        {"address": "10.0.0.5:0"},
        {"address": "10.0.0.5:99999"},
        {"control_host": "0.0.0.0"},
        {"control_host": "my-host"},
        {"decode_workers": 0},
        {"decode_workers": 65},
        {"control_keys": Path("/no/such/keys")},
    ],
    ids=str,
)
def test_a_satellite_refuses_what_cannot_work_before_it_asks(
    keys: Path, changes: dict[str, Any]
) -> None:
    values = {"address": "10.0.0.5:30001", "control_host": "10.0.0.6", "control_keys": keys}
    assert JoinConfig(**values)
    with pytest.raises(ConfigError):
        JoinConfig(**(values | changes))


def test_a_name_that_is_no_text_is_refused_before_it_is_written(
    spec: RunSpec, tmp_path: Path
) -> None:
    config = spec.config | {"served_model_name": "m\udcff"}
    run = msgspec.structs.replace(spec, run_dir=str(tmp_path), config=config)
    with pytest.raises(ConfigError, match=r"no UTF-8: 'm\\udcff'; to change it: "):
        run.save()
    assert list(tmp_path.iterdir()) == []
