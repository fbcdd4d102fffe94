"""The model over real pools and reads, on 1, 2 and 4 ranks, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.testing.model_on_ranks import ComputedRows, compute
from cp_shared_kv.testing.oracle_cases import NEW_TOKENS, PROMPT_TOKENS
from cp_shared_kv.testing.rank_pool import RankPool
from cp_shared_kv.testing.recording_ops import RecordedSelections
from cp_shared_kv.testing.routing_margin import SURE_ROUTING_MARGIN

ARCHITECTURES = ["deepseek_v32", "glm_moe_dsa, list", "glm_moe_dsa, frequency"]
MODELS = [*ARCHITECTURES, "deepseek_v32, block fp8", "glm_moe_dsa, block fp8"]
CASES = ["one-shot", "chunked", "prefix hit", "prefix hit, chunked", "decode", "mixed batches"]
RELATIVE_ERROR = 2e-6


def assert_agrees(computed: ComputedRows, case: str, model: Any) -> None:
    schedule = model.schedules[case]
    assert [tuple(row) for row in computed.rows.tolist()] == schedule.rows
    agreement = model.oracle.compare(computed, [r.token_ids for r in schedule.requests])
    # The comparison means something only where most rows leave positions out, and surely, and no
    # choice of experts is so near that rounding may turn it.
    assert agreement.least_routing_margin > SURE_ROUTING_MARGIN, agreement
    assert agreement.sure_rows > 0.95 * agreement.sparse_rows > agreement.rows
    assert agreement.relative_error <= RELATIVE_ERROR, agreement
    assert agreement.sure_rows_agreeing == agreement.sure_rows, agreement
    assert agreement.greedy_agreeing == agreement.rows, agreement


def on_one_rank(model: Any, case: str) -> ComputedRows:
    recorded = RecordedSelections()
    transformer = Transformer.load(model.checkpoint, ops=recorded.ops)
    return compute(transformer, recorded, SoloGroup(), model.schedules[case], "in-seq-split")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_one_rank_agrees_with_transformers(model: Any, case: str) -> None:
    assert_agrees(on_one_rank(model, case), case, model)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("split", ["in-seq-split", "round-robin-split"])
@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("model", ARCHITECTURES, indirect=True)
def test_a_sharing_group_agrees_with_transformers(
    rank_pool: RankPool, tmp_path: Path, model: Any, cp_size: int, split: str, case: str
) -> None:
    rank_pool.run(
        "cp_shared_kv.testing.model_on_ranks:compute_on_rank",
        size=cp_size,
        checkpoint=str(model.checkpoint),
        schedule=msgspec.to_builtins(model.schedules[case]),
        split=split,
        directory=str(tmp_path),
    )
    ranks = [ComputedRows.load(tmp_path / f"rank{rank}.safetensors") for rank in range(cp_size)]
    assert_agrees(ComputedRows.merged(ranks), case, model)


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_decoding_greedily_writes_the_tokens_of_transformers_generate(model: Any) -> None:
    logits = on_one_rank(model, "decode").logits
    continuation = logits[PROMPT_TOKENS - 1 : -1].argmax(dim=1).tolist()
    assert continuation == model.generated[PROMPT_TOKENS:]
    assert len(continuation) == NEW_TOKENS


@pytest.mark.parametrize("model", ARCHITECTURES, indirect=True)
def test_chunking_changes_only_the_rounding(model: Any) -> None:
    whole, chunked = on_one_rank(model, "one-shot"), on_one_rank(model, "chunked")
    difference = (whole.logits - chunked.logits).norm() / whole.logits.norm()
    assert difference <= RELATIVE_ERROR
    sure = (whole.margins > 1e-5) & (chunked.margins > 1e-5)
    assert torch.equal(whole.selected[sure], chunked.selected[sure])
