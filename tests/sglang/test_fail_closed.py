"""What stands between a half-working plugin and a server that computes with half of the KV."""

from __future__ import annotations

import multiprocessing

import pytest
from spawned import verified_in_a_scheduler_process

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.integrations.sglang import FLAG, hooks, verify, versions
from cp_shared_kv.integrations.sglang.settings import RUN_WITH_FLAG

pytestmark = pytest.mark.usefixtures("plugins_loaded")


def _answer(monkeypatch: pytest.MonkeyPatch, sabotage: str = "") -> str:
    monkeypatch.setenv(RUN_WITH_FLAG, "1")
    spawn = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[str] = spawn.Queue()
    child = spawn.Process(target=verified_in_a_scheduler_process, args=(sabotage, answers))
    child.start()
    try:
        return answers.get(timeout=200)
    finally:
        child.join(20)
        child.kill()


def test_every_hook_is_applied_in_a_scheduler_process(monkeypatch) -> None:
    assert _answer(monkeypatch) == "complete"


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        ("flag lost", "hook not applied: sglang.srt.model_executor"),
        ("function exchanged", "filter_kv_indices_for_cp_rank was exchanged in this process"),
        ("function gone", "hook not applied: sglang.srt.disaggregation.mooncake"),
        ("replaced by a stranger", "add_one_req is replaced by another plugin"),
    ],
)
def test_no_pool_without_all_of_it(monkeypatch, sabotage: str, said: str) -> None:
    assert said in _answer(monkeypatch, sabotage)


def test_the_front_end_wraps_nothing_but_the_flag() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    ours = {hook.target for hook in verify.REQUIRED}

    assert HookRegistry._patched & ours == {hook.target for hook in hooks.DOOR}


def test_installed_sources_are_the_tested_ones() -> None:
    assert verify.why_unfit(versions.installed_version()) == []


def test_an_edited_function_is_named(monkeypatch) -> None:
    release = versions.release(versions.installed_version())
    assert release is not None
    target = hooks.WORKER[0].target
    monkeypatch.setattr(release, "FINGERPRINTS", {**release.FINGERPRINTS, target: "0" * 16})

    (reason,) = verify.why_unfit(versions.installed_version())

    assert reason.startswith(f"{target} has been changed")


@pytest.mark.usefixtures("sglang_on_a_gpu_host")
def test_an_untested_release_is_refused_when_arguments_are_parsed(model_path, monkeypatch) -> None:
    from sglang.srt.server_args import prepare_server_args

    monkeypatch.setattr(versions, "installed_version", lambda: "0.5.13")

    with pytest.raises(ConfigError, match=r"SGLang 0.5.13: tested are 0.5.11, 0.5.12.post1"):
        prepare_server_args(
            [
                *("--model-path", model_path, "--device", "cuda", "--tp", "8"),
                *("--disaggregation-mode", "prefill", "--enable-nsa-prefill-context-parallel"),
                *("--nsa-prefill-cp-mode", "in-seq-split", FLAG),
            ]
        )


def test_without_its_gate_the_flag_does_not_exist(monkeypatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import prepare_server_args

    gate = hooks.DOOR[-1].target
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {gate})

    with pytest.raises(SystemExit):
        prepare_server_args(["--model-path", "dummy", FLAG])
