"""cpkv sglang doctor: the same answers as the server's, before there is a server."""

from __future__ import annotations

import pytest

from cp_shared_kv.cli.sglang import doctor
from cp_shared_kv.integrations.sglang import FLAG, versions
from cp_shared_kv.integrations.sglang.settings import ALL_RANKS_SEND

pytestmark = pytest.mark.usefixtures("plugins_loaded", "sglang_on_a_gpu_host")


def _server(model_path: str, *more: str) -> list[str]:
    return ["--model-path", model_path, "--device", "cuda", "--tp", "8", *more]


def test_this_environment_is_fit(capsys) -> None:
    assert doctor() == 0

    said = capsys.readouterr().out
    assert f"ok   SGLang: {versions.installed_version()}" in said
    assert "entry point: cp_shared_kv.integrations.sglang.plugin:activate" in said
    assert "functions and classes as tested" in said


def test_a_release_that_was_not_tested(capsys, monkeypatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.5.14")

    assert doctor() == 1
    assert "BAD  SGLang: 0.5.14 (tested: 0.5.11, 0.5.12.post1)" in capsys.readouterr().out


def test_a_command_line_that_would_be_accepted(capsys, model_path) -> None:
    argv = _server(
        *(model_path, FLAG, "--disaggregation-mode", "prefill"),
        *("--enable-nsa-prefill-context-parallel", "--nsa-prefill-cp-mode", "in-seq-split"),
    )

    assert doctor(*argv) == 0
    assert "ok   command line: accepted" in capsys.readouterr().out


def test_every_reason_against_a_command_line(capsys, model_path) -> None:
    assert doctor(*_server(model_path, FLAG, "--enable-hierarchical-cache")) == 1

    said = capsys.readouterr().out
    assert "--enable-nsa-prefill-context-parallel = False" in said
    assert "--disaggregation-mode = null" in said
    assert "--enable-hierarchical-cache = True" in said


@pytest.mark.parametrize(("value", "status"), [("1", 0), (None, 1)])
def test_the_environment_of_a_decode_server(capsys, monkeypatch, model_path, value, status) -> None:
    if value is None:
        monkeypatch.delenv(ALL_RANKS_SEND, raising=False)
    else:
        monkeypatch.setenv(ALL_RANKS_SEND, value)

    assert doctor(*_server(model_path, "--disaggregation-mode", "decode")) == status
    assert ALL_RANKS_SEND in capsys.readouterr().out


@pytest.mark.parametrize("left", [True, False])
def test_half_of_a_roll_back_is_told(capsys, monkeypatch, model_path, left) -> None:
    monkeypatch.setenv(ALL_RANKS_SEND, "1" if left else "0")
    argv = _server(
        *(model_path, "--disaggregation-mode", "prefill"),
        *("--enable-nsa-prefill-context-parallel", "--nsa-prefill-cp-mode", "in-seq-split"),
    )

    assert doctor(*argv) == 1
    said = capsys.readouterr().out
    assert f"{FLAG} is not given" in said
    assert (f"BAD  {ALL_RANKS_SEND}: set without the flag" in said) == left


def test_shut_out_by_sglangs_own_list(capsys, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another_one")

    assert doctor() == 1
    assert "shut out by SGLANG_PLUGINS=another_one" in capsys.readouterr().out
