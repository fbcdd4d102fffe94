"""The schedules that are compared with the oracle, on a model that makes mistakes show."""

from __future__ import annotations

import random
from typing import Any

from cp_shared_kv.demo_model.shapes import GlmModelShape, ModelShape
from cp_shared_kv.engine.config_values import KVCacheDtype
from cp_shared_kv.testing.schedule import PlannedRequest, Schedule, Span, in_chunks

# Sixteen index heads: with a few, all may be negative for a key, and scores tie at exactly 0.
ORACLE_SIZES: dict[str, Any] = {"num_hidden_layers": 4, "index_n_heads": 16, "index_topk": 16}
# transformers takes the weights of a matrix to be cut into equal blocks. These sizes are below 128
# or a multiple of it; the others have cut blocks at their edges.
_WHOLE_BLOCKS = {"num_attention_heads": 8}

GLM_LIST = {"indexer_types": ["full", "shared", "full", "shared"]}
GLM_FREQUENCY = {"index_topk_freq": 3, "index_skip_topk_offset": 1}
"""Two shared layers in a row: full, shared, shared, full."""

ORACLE_SHAPES: dict[str, ModelShape] = {
    "deepseek_v32": ModelShape(**ORACLE_SIZES),
    "glm_moe_dsa, list": GlmModelShape(**ORACLE_SIZES, indexer=GLM_LIST),
    "glm_moe_dsa, frequency": GlmModelShape(**ORACLE_SIZES, indexer=GLM_FREQUENCY),
    "deepseek_v32, block fp8": ModelShape(**ORACLE_SIZES, **_WHOLE_BLOCKS, block_fp8=True),
    "glm_moe_dsa, block fp8": GlmModelShape(
        **ORACLE_SIZES, **_WHOLE_BLOCKS, indexer=GLM_FREQUENCY, block_fp8=True
    ),
}
"""The models by name; a part of the name before the comma is the architecture."""

# Rounding exchanges positions and experts that are nearly tied; with small branches at little cost.
_WIDE: dict[str, Any] = {"kv_lora_rank": 256, "index_head_dim": 128, "branch_scale": 0.1}
_NARROW: dict[str, Any] = {"branch_scale": 0.1}
PAGE_FORMAT_SHAPES: dict[str, tuple[ModelShape, tuple[KVCacheDtype, ...]]] = {
    "deepseek_v32, narrow": (ModelShape(**ORACLE_SIZES, **_NARROW), ("bf16",)),
    "deepseek_v32, wide": (ModelShape(**ORACLE_SIZES, **_WIDE), ("fp32", "bf16", "fp8_e4m3")),
    "glm_moe_dsa, narrow": (
        GlmModelShape(**ORACLE_SIZES, **_NARROW, indexer=GLM_FREQUENCY),
        ("bf16",),
    ),
    "glm_moe_dsa, wide": (
        GlmModelShape(**ORACLE_SIZES, **_WIDE, indexer=GLM_FREQUENCY),
        ("fp32", "bf16", "fp8_e4m3"),
    ),
}
"""Models for the page formats, and the formats that their widths take. With bf16 the wide ones
store index K in fp8, the narrow ones in bf16."""

_CHUNK_SIZES = (7, 33, 64, 65, 1, 2)
PROMPT_TOKENS = 290
NEW_TOKENS = 12
_PAGE_SIZE = 16


def prompt(seed: int, tokens: int) -> list[int]:
    """Seeded random bytes as token ids."""
    return list(random.Random(seed).randbytes(tokens))  # noqa: S311 - a test input, not a secret


def oracle_schedules(generated: list[int]) -> dict[str, Schedule]:
    """The cases by name. `generated` is a prompt with the oracle's NEW_TOKENS greedy tokens."""
    short = prompt(2, 45)
    lone = [PlannedRequest(generated)]
    end = len(generated)
    prompt_end = end - NEW_TOKENS
    # The second request has the first 6 pages of the first and goes on in its own way.
    branch = generated[: 6 * _PAGE_SIZE] + prompt(3, 70)
    hit = [PlannedRequest(generated), PlannedRequest(branch, shares=0, shared_pages=6)]
    hit_start = 6 * _PAGE_SIZE
    three = [*hit, PlannedRequest(short)]
    return {
        "one-shot": Schedule(_PAGE_SIZE, lone, [[Span(0, 0, end)]]),
        "chunked": Schedule(_PAGE_SIZE, lone, in_chunks(0, 0, _CHUNK_SIZES, end)),
        "prefix hit": Schedule(
            _PAGE_SIZE, hit, [[Span(0, 0, end)], [Span(1, hit_start, len(branch))]]
        ),
        "prefix hit, chunked": Schedule(
            _PAGE_SIZE,
            hit,
            [*in_chunks(0, 0, (100,), end), *in_chunks(1, hit_start, (31, 1), len(branch))],
        ),
        "decode": Schedule(
            _PAGE_SIZE, lone, [[Span(0, 0, prompt_end)], *in_chunks(0, prompt_end, (1,), end)]
        ),
        "mixed batches": Schedule(
            _PAGE_SIZE,
            three,
            [
                [Span(0, 0, 101)],
                [Span(0, 101, 150), Span(1, hit_start, 130), Span(2, 0, 3)],
                [Span(1, 130, 131), Span(2, 3, 44), Span(0, 150, end - 1)],
                [Span(2, 44, 45), Span(0, end - 1, end), Span(1, 131, len(branch))],
            ],
        ),
    }
