"""`cpkv plan` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cp_shared_kv.planner.model_catalogue import BUILT_IN

from .conftest import Command


def test_plan_shows_three_arrangements_side_by_side(cpkv: Command) -> None:
    code, out, _ = cpkv("plan", "glm-5", "--kv-budget-gib", "22.145", "--lengths", "8192, 131072")
    assert code == 0
    assert "replicated   layer split      shared" in out
    assert "237,312" in out
    assert "1,898,496" in out
    assert "prompts of 131,072 at once" in out


def test_plan_says_whose_split_of_weights_it_has(cpkv: Command) -> None:
    whole = "1,384.65 GiB in bf16"  # 743.4 billion parameters without multi-token prediction
    note = " ".join(cpkv("plan", "glm-5.2", "--gpu", "h200")[1].split())
    assert "split as in SGLang's servers" in note
    assert f"on each rank, {whole}: this model does not fit it." in note
    assert "SGLang" not in cpkv("plan", "glm-5.2", "--kv-budget-gib", "20")[1]  # no weights in it
    assert "does not fit" not in cpkv("plan", "glm-5.2", "--gpu-memory-gib", "1400")[1]


def test_plan_as_json_has_every_figure(cpkv: Command) -> None:
    code, out, _ = cpkv("plan", "glm-5.2", "--gpu", "h200", "--json", "--lengths", "65536")
    assert code == 0
    found = json.loads(out)
    assert (found["model"], found["gpu"], found["cp_size"]) == ("glm-5.2", "h200", 8)
    shared = found["arrangements"][-1]
    assert shared["arrangement"] == "shared"
    assert shared["logical_tokens"] == 8 * shared["physical_tokens"]
    assert shared["concurrent_requests"]["65536"] == shared["logical_tokens"] // 65_536
    assert (
        found["weight_bytes"] + shared["pool_bytes"] + shared["scratch_bytes"]
        <= (found["usable_bytes"])
    )
    assert found["versions"]["cp-shared-kv"]
    assert "commit" in found
    assert found["settings"]["kv_cache_dtype"] == "bf16"
    assert (found["settings"]["page_size"], found["settings"]["expert_ranks"]) == (64, 8)


def test_plan_takes_a_config_json(cpkv: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BUILT_IN["deepseek-v3.2"]))
    by_file = cpkv("plan", tmp_path, "--gpu-memory-gib", "141", "--json")[1]
    by_name = cpkv("plan", "deepseek-v3.2", "--gpu-memory-gib", "141", "--json")[1]
    assert json.loads(by_file)["arrangements"] == json.loads(by_name)["arrangements"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("glm-5",), "one of --gpu, --gpu-memory-gib and --kv-budget-gib"),
        (("glm-5",), "say --gpu h200, for example; known are h20, h20-3e, h100"),
        (("glm-5", "--gpu", "h200", "--gpu-memory-gib", "80"), "drop one of the two"),
        (
            ("glm-5", "--gpu", "h200", "--kv-budget-gib", "20"),
            "--kv-budget-gib; to change it: drop one of the two\n",
        ),
        (("deepseek-v3.2", "--gpu", "h20"), "--expert-parallel-size"),
        (("no-such-model", "--gpu", "h200"), "deepseek-v3.2, glm-5, glm-5.2"),
        (("glm-5", "--gpu", "abacus"), "h20-3e"),
        (("glm-5", "--gpu", "h200", "--page-size", "60"), "not a power of two"),
        (("glm-5", "--gpu-memory-gib", "nan"), "--gpu-memory-gib is out of range: nan"),
        (("glm-5", "--kv-budget-gib", "inf"), "--kv-budget-gib is out of range: inf"),
        (("glm-5", "--kv-budget-gib", "-1"), "--kv-budget-gib is out of range: -1"),
        (("glm-5", "--kv-budget-gib", "1e300"), "--kv-budget-gib is out of range: 1e+300; allowed"),
        (("glm-5", "--gpu-memory-gib", "1e300"), "above 0, at most 1048576"),
        (("glm-5", "--gpu", "h200", "--expert-parallel-size", "0"), "--expert-parallel-size"),
        (
            ("glm-5", "--gpu", "h200", "--expert-parallel-size", "7"),
            "--expert-parallel-size does not divide the 256 routed experts: 7; allowed: 1, 2, 4,",
        ),
        (("glm-5", "--gpu", "h200", "--context-length", "0"), "--context-length is out of range"),
        (("glm-5", "--gpu", "h200", "--cp-size", "0"), "--attention-context-parallel-size"),
        (("glm-5", "--gpu", "h200", "--lengths="), "--lengths is empty"),
    ],
)
def test_what_plan_refuses_is_one_line_that_says_what_to_change(
    cpkv: Command, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = cpkv("plan", *arguments)
    assert (code, out) == (1, "")
    assert said in err
    assert err.startswith("cpkv: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("dtype", "advised"), [("auto", False), ("fp8", False), ("bf16", True)])
def test_fp8_weights_are_advised_only_where_they_are_not_fp8_already(
    cpkv: Command, dtype: str, advised: bool
) -> None:
    _, _, err = cpkv("plan", "glm-5.2", "--gpu", "h20", "--weight-dtype", dtype)
    assert "take GPUs with more memory" in err
    assert ("--weight-dtype fp8" in err) is advised


@pytest.mark.parametrize("lengths", ["8,x", "0", "-3", "1.5"])
def test_a_list_that_is_none_is_refused(cpkv: Command, lengths: str) -> None:
    code, _, err = cpkv("plan", "glm-5", "--gpu", "h200", f"--lengths={lengths}")
    assert code == 2
    assert "--lengths" in err
    assert "no whole number above 0" in err
