"""A cluster on a GLM model whose weights are fp8 and whose layers share selections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cp_shared_kv.demo_model.shapes import GlmModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.engine.cluster import no_progress
from cp_shared_kv.engine.replay import compare_recordings, replay_replicated
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.testing.running_cluster import PHYSICAL_TOKENS, running, small_config

pytestmark = pytest.mark.e2e

OUTPUT_TOKENS = 4
SHAPE = GlmModelShape(
    num_hidden_layers=4,
    indexer={"index_topk_freq": 3, "index_skip_topk_offset": 1},
    block_fp8=True,
)
# 64 tokens of 80 fp32 values of latent in four layers, and 32 of index K in the two that have it.
PAGE_BYTES = 64 * 4 * (4 * 80 + 2 * 32)


def test_sharing_changes_no_bit_of_a_glm_model_in_fp8(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model", SHAPE, seed=0)
    assert ModelConfig.from_directory(tmp_path / "model").index_layers == (0, 3)
    shared, replicated = tmp_path / "shared", tmp_path / "replicated"
    config = small_config(model_path=tmp_path / "model", record_batches=shared)
    text = "".join(f"clause {i}: the tenant may do thing {i * i % 97}. " for i in range(40))
    prompts = [text[: PHYSICAL_TOKENS + 200], text[:500] + " and then?", "x"]
    with running(config, tmp_path / "log") as served:
        for prompt in prompts:
            answer = served.post(
                {"model": "demo", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            )
            answer.raise_for_status()
        transfers = served.log_lines("CP shared KV transfer")
        replay_replicated(served.cluster, shared, replicated, on_progress=no_progress)
    found = compare_recordings(shared, replicated, 2)
    assert found.difference is None
    # The second prompt's first 448 tokens, 7 pages, are those of the first.
    assert found.prompt_rows == sum(map(len, prompts)) - 448
    assert found.decode_rows == len(prompts) * (OUTPUT_TOKENS - 1)
    sent = [re.search(r"pages=(\d+) .*bytes=(\d+)$", line) for line in transfers]
    assert len(sent) > 0
    assert all(line and int(line[2]) == int(line[1]) * PAGE_BYTES for line in sent)
