"""DeepGEMM and FlashMLA as ops: near the equations, and the same bits whatever is cut or moved.

Skipped where they are not installed. SGLang's kernels bring both.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.memory.formats.registry import index_format
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.ops.choice import ops_for
from cp_shared_kv.model.ops.hopper import LEAST_QUERIES, hopper_ops
from cp_shared_kv.model.ops.interface import AttentionOps
from cp_shared_kv.model.ops.reference import select_topk

pytestmark = pytest.mark.gpu

INDEX_HEADS, HEADS, LATENT, ROPE, INDEX = 64, 128, 512, 64, 128
SCALE = 192**-0.5
MODEL = ModelConfig.from_dict(
    ModelShape(
        num_attention_heads=HEADS,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        index_n_heads=INDEX_HEADS,
        index_head_dim=INDEX,
    ).config()
)


@pytest.fixture(scope="module")
def ops(gpu: torch.device) -> AttentionOps:
    found = hopper_ops(MODEL, gpu)
    if found.lacking:
        pytest.skip("; ".join(found.lacking))
    return found.ops


@pytest.fixture
def generator(gpu: torch.device) -> torch.Generator:
    return torch.Generator(gpu).manual_seed(0)


def test_the_log_names_them(gpu: torch.device, ops: AttentionOps) -> None:
    assert ops.index_scores_fp8 is not None
    for choice in ("auto", "hopper"):
        name, _ = ops_for(choice, gpu, torch.bfloat16, MODEL)
        assert name == (
            "DeepGEMM for index scores, FlashMLA for sparse attention,"
            " Triton kernels in bf16 for the rest"
        )


def queries_and_keys(
    generator: torch.Generator, rows: int, keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, head weights, codes and scales."""
    device = generator.device
    q = torch.randn(rows, INDEX_HEADS, INDEX, generator=generator, device=device).bfloat16()
    weights = torch.randn(rows, INDEX_HEADS, generator=generator, device=device)
    stored = index_format("fp8_scaled", index_head_dim=INDEX, page_size=64)
    quantised = stored.quantised(
        stored.encode(torch.randn(keys, INDEX, generator=generator, device=device))
    )
    assert quantised is not None
    return q, weights, *quantised


def test_index_scores_are_near_the_equation(ops: AttentionOps, generator: torch.Generator) -> None:
    q, weights, codes, scales = queries_and_keys(generator, 70, 3001)
    assert ops.index_scores_fp8 is not None
    got = ops.index_scores_fp8(q, weights, codes, scales)
    keys = codes.view(torch.float8_e4m3fn).double() * scales.double().unsqueeze(1)
    products = torch.einsum("thd,sd->ths", q.double(), keys).relu()
    expected = torch.einsum("ths,th->ts", products, weights.double())
    assert (got.double() - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 300])
def test_cut_keys_have_the_scores_of_the_whole(
    ops: AttentionOps, generator: torch.Generator, rows: int
) -> None:
    q, weights, codes, scales = queries_and_keys(generator, rows, 10_007)
    assert ops.index_scores_fp8 is not None
    whole = ops.index_scores_fp8(q, weights, codes, scales)
    for cuts in ([1024], [5120, 9216], [1024, 2048, 3072, 9216]):
        bounds = [0, *cuts, len(codes)]
        for start, stop in pairwise(bounds):
            # A tensor of its own: pieces begin where memory does.
            part = slice(start, stop)
            got = ops.index_scores_fp8(q, weights, codes[part].clone(), scales[part].clone())
            assert torch.equal(got, whole[:, part])


def test_scores_do_not_depend_on_the_other_queries(
    ops: AttentionOps, generator: torch.Generator
) -> None:
    # Both of as many as the library is asked for; fewer go by our kernel, which rounds otherwise.
    rows, some_rows = 2 * LEAST_QUERIES + 9, LEAST_QUERIES + 5
    q, weights, codes, scales = queries_and_keys(generator, rows, 4000)
    assert ops.index_scores_fp8 is not None
    whole = ops.index_scores_fp8(q, weights, codes, scales)
    order = torch.randperm(rows, generator=generator, device=q.device)[:some_rows]
    some = ops.index_scores_fp8(q[order], weights[order], codes, scales)
    assert torch.equal(some, whole[order])


def test_the_scores_go_into_top_k_as_they_come(
    ops: AttentionOps, generator: torch.Generator
) -> None:
    q, weights, codes, scales = queries_and_keys(generator, 64, 5001)
    assert ops.index_scores_fp8 is not None
    scores = ops.index_scores_fp8(q, weights, codes, scales)
    visible = torch.randint(1, 5002, (64,), generator=generator, device=q.device)
    assert torch.equal(
        select_topk(scores, visible, 2048), select_topk(scores.contiguous(), visible, 2048)
    )


def attended(
    generator: torch.Generator, tokens: int, heads: int, chosen: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of both kinds, rows and slots by ascending order, with rows that nobody selects."""
    device = generator.device
    q_latent = torch.randn(heads, tokens, LATENT, generator=generator, device=device).bfloat16()
    q_pe = torch.randn(tokens, heads, ROPE, generator=generator, device=device).bfloat16()
    rows = torch.randn(4096, LATENT + ROPE, generator=generator, device=device).bfloat16()
    rows[::5] = float("nan")
    free = torch.arange(4096, device=device)
    free = free[free % 5 != 0]
    slots = torch.stack([
        free[torch.randperm(len(free), generator=generator, device=device)[:chosen].sort().values]
        for _ in range(tokens)
    ])  # fmt: skip
    slots[0, chosen // 2 + 1 :] = -1
    return q_latent.transpose(0, 1), q_pe, rows, slots


CASES = [(7, 128, 2048), (3, 128, 1), (5, 64, 130), (4, 16, 700)]


@pytest.mark.parametrize(("tokens", "heads", "chosen"), CASES)
def test_attention_is_near_the_equation(
    ops: AttentionOps, generator: torch.Generator, tokens: int, heads: int, chosen: int
) -> None:
    q_latent, q_pe, rows, slots = attended(generator, tokens, heads, chosen)
    assert ops.attend_rows is not None
    got = ops.attend_rows(q_latent, q_pe, rows, slots, SCALE)
    assert got is not None
    gathered = rows[torch.where(slots < 0, slots[:, :1], slots)].double()
    logits = torch.einsum("thd,tkd->thk", torch.cat([q_latent, q_pe], 2).double(), gathered)
    weights = (logits * SCALE).masked_fill((slots < 0).unsqueeze(1), float("-inf")).softmax(2)
    expected = torch.einsum("thk,tkd->thd", weights, gathered[..., :LATENT])
    assert (got.double() - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize(("tokens", "heads", "chosen"), CASES)
def test_attention_does_not_depend_on_where_rows_lie_nor_on_other_tokens(
    ops: AttentionOps, generator: torch.Generator, tokens: int, heads: int, chosen: int
) -> None:
    q_latent, q_pe, rows, slots = attended(generator, tokens, heads, chosen)
    assert ops.attend_rows is not None
    first = ops.attend_rows(q_latent, q_pe, rows, slots, SCALE)
    order = torch.randperm(len(rows), generator=generator, device=rows.device)
    moved = torch.full((len(rows) + 500, rows.shape[1]), float("nan"), device=rows.device)
    moved = moved.bfloat16()
    moved[order + 500] = rows
    there = torch.where(slots < 0, -1, order[slots.clamp(min=0)] + 500)
    padded = torch.nn.functional.pad(there, (0, 2048 - chosen), value=-1)
    for places in (there, padded):
        again = ops.attend_rows(q_latent, q_pe, moved, places, SCALE)
        assert first is not None
        assert again is not None
        assert torch.equal(again, first)
    one = ops.attend_rows(q_latent[1:2], q_pe[1:2], rows, slots[1:2], SCALE)
    assert one is not None
    assert torch.equal(one, first[1:2])
