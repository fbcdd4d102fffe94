"""Every rule of the support matrix by itself, without SGLang."""

from __future__ import annotations

import types
from typing import Any

import pytest

from cp_shared_kv.integrations.sglang.support import BACKENDS, refusals

GOOD = {
    "model_path": "somewhere",
    "enable_nsa_prefill_context_parallel": True,
    "nsa_prefill_cp_mode": "in-seq-split",
    "disaggregation_mode": "prefill",
    "disaggregation_transfer_backend": "mooncake",
    "device": "cuda",
    "page_size": 64,
    "pp_size": 1,
    "dp_size": 1,
    "attention_backend": "nsa",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "kv_cache_dtype": "bfloat16",
    "nsa_prefill_backend": "flashmla_sparse",
    "nsa_decode_backend": "fa3",
    "speculative_algorithm": None,
    "speculative_draft_model_path": None,
}


def _refused(dsa_model: bool = True, **changed: Any) -> list[str]:
    args = types.SimpleNamespace(**{**GOOD, **changed})
    return [refusal.setting for refusal in refusals(args, dsa_model=dsa_model)]


def test_a_supported_server_is_refused_nothing() -> None:
    assert _refused() == []


@pytest.mark.parametrize("split", ["in-seq-split", "round-robin-split"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "fp4_e2m1"])
@pytest.mark.parametrize(
    "backend", ["flashmla_sparse", "flashmla_kv", "tilelang", "fa3", "trtllm", "aiter"]
)
def test_backends_by_split_and_type(split: str, dtype: str, backend: str) -> None:
    allowed = backend in BACKENDS.get((split, dtype), ())
    refused = _refused(nsa_prefill_cp_mode=split, kv_cache_dtype=dtype, nsa_prefill_backend=backend)

    assert (refused == []) == allowed


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("enable_nsa_prefill_context_parallel", False, "--enable-nsa-prefill-context-parallel"),
        ("disaggregation_mode", "null", "--disaggregation-mode"),
        ("disaggregation_mode", "decode", "--disaggregation-mode"),
        ("disaggregation_transfer_backend", "nixl", "--disaggregation-transfer-backend"),
        ("device", "cpu", "--device"),
        ("page_size", 1, "--page-size"),
        ("pp_size", 2, "--pp-size"),
        ("dp_size", 2, "--dp-size"),
        ("attention_backend", "flashinfer", "--attention-backend"),
        ("prefill_attention_backend", "fa3", "--prefill-attention-backend"),
        ("nsa_decode_backend", "trtllm", "--nsa-decode-backend"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        ("enable_hisparse", True, "--enable-hisparse"),
        ("enable_lmcache", True, "--enable-lmcache"),
        ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("enable_mixed_chunk", True, "--enable-mixed-chunk"),
        ("enable_memory_saver", True, "--enable-memory-saver"),
        ("use_ray", True, "--use-ray"),
        ("enable_streaming_session", True, "--enable-streaming-session"),
        ("dllm_algorithm", "LowConfidence", "--dllm-algorithm"),
        ("speculative_algorithm", "EAGLE3", "--speculative-algorithm"),
        ("speculative_algorithm", "NGRAM", "--speculative-algorithm"),
        ("enable_multi_layer_eagle", True, "--enable-multi-layer-eagle"),
        ("enable_prefill_context_parallel", True, "--enable-prefill-context-parallel"),
    ],
)
def test_each_setting_that_is_refused(setting: str, value: object, named: str) -> None:
    assert _refused(**{setting: value}) == [named]


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
def test_drafts_by_the_models_own_layer_are_accepted(algorithm: str) -> None:
    own = {"speculative_algorithm": algorithm, "speculative_draft_model_path": "somewhere"}

    assert _refused(**own) == []
    own["speculative_draft_model_path"] = "elsewhere"
    assert _refused(**own) == ["--speculative-draft-model-path"]


def test_a_model_without_dsa_is_refused() -> None:
    assert _refused(dsa_model=False) == ["--model-path"]


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
        "SGLANG_DISAGG_STAGING_BUFFER",
        "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
    ],
)
def test_environment_that_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert _refused() == [name]
    monkeypatch.setenv(name, "false")
    assert _refused() == []
