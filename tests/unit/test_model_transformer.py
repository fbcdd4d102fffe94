"""The transformer on a KV cache of plain tensors: batches, empty ranks, bounded memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_shared_kv.demo_model.shapes import GlmModelShape, ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.model import query_blocks
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.ops.interface import AttentionOps
from cp_shared_kv.model.ops.reference import REFERENCE_OPS
from cp_shared_kv.model.query_blocks import ON_CPU
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.model.weights import load_weights

SHAPE = ModelShape(index_topk=16, index_n_heads=16)
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Rows:
    start: int
    stop: int
    slots: torch.Tensor


@dataclass(frozen=True)
class Keys:
    request: int
    start: int
    keys: torch.Tensor
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.keys)


class TensorKV:
    """A KVAccess of one tensor a layer and kind; never-written slots hold NaN."""

    piece_tokens = 1 << 20
    rows_at_once = 1 << 20

    def __init__(self, config: ModelConfig, size: int) -> None:
        layers = config.num_hidden_layers
        self._index_layers = config.index_layers
        self.stored_layers: list[int] = []
        self._latent = torch.full((layers, size, config.kv_lora_rank), float("nan"))
        self._k_pe = torch.full((layers, size, config.qk_rope_head_dim), float("nan"))
        self._index_k = torch.full((layers, size, config.index_head_dim), float("nan"))
        self.requests: list[Rows] = []
        self._new_slots = torch.empty(0, dtype=torch.int64)

    def begin(self, spans: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """A batch of (slots of a request so far, how many of them are new); gives positions."""
        self.requests, start = [], 0
        for slots, new in spans:
            self.requests.append(Rows(start, start + new, slots))
            start += new
        self._new_slots = torch.cat([slots[len(slots) - new :] for slots, new in spans])
        return torch.cat([torch.arange(len(slots) - new, len(slots)) for slots, new in spans])

    def store(
        self, layer: int, latent: torch.Tensor, k_pe: torch.Tensor, index_k: torch.Tensor | None
    ) -> None:
        self.stored_layers.append(layer)
        assert (index_k is not None) == (layer in self._index_layers)
        self._latent[layer, self._new_slots] = latent.float()
        self._k_pe[layer, self._new_slots] = k_pe.float()
        if index_k is not None:
            self._index_k[layer, self._new_slots] = index_k.float()

    def latent(self, layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._latent[layer, places], self._k_pe[layer, places]

    def index_pieces(self, layer: int) -> Iterator[Keys]:
        for number, request in enumerate(self.requests):
            for start in range(0, len(request.slots), self.piece_tokens):
                slots = request.slots[start : start + self.piece_tokens]
                yield Keys(number, start, self._index_k[layer, slots])

    def bring(self, layer: int, selected: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        for start in range(0, len(selected), self.rows_at_once):
            part = slice(start, min(start + self.rows_at_once, len(selected)))
            yield part, selected[part]

    def latent_rows(self, layer: int, places: torch.Tensor) -> None:
        return None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("transformer") / "model"
    make_tiny_checkpoint(directory, SHAPE, seed=0)
    return directory


@pytest.fixture(scope="module")
def transformer(checkpoint: Path) -> Transformer:
    return Transformer.load(checkpoint)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


def alone(transformer: Transformer, token_ids: torch.Tensor) -> torch.Tensor:
    kv = TensorKV(transformer.config, len(token_ids))
    positions = kv.begin([(torch.arange(len(token_ids)), len(token_ids))])
    return transformer.logits(transformer.forward(token_ids, positions, kv))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def test_a_rank_without_tokens_still_stores_every_layer(transformer: Transformer) -> None:
    kv = TensorKV(transformer.config, 8)
    positions = kv.begin([(torch.arange(8), 0), (torch.arange(3), 0)])
    hidden = transformer.forward(tokens(0), positions, kv)
    assert kv.stored_layers == [0, 1]
    assert hidden.shape == (0, SHAPE.hidden_size)
    assert transformer.logits(hidden).shape == (0, transformer.config.vocab_size)


def test_layers_are_stored_in_order_once_a_forward(transformer: Transformer) -> None:
    kv = TensorKV(transformer.config, 40)
    transformer.forward(tokens(40), kv.begin([(torch.arange(40), 40)]), kv)
    assert kv.stored_layers == [0, 1]


def test_requests_of_one_batch_do_not_see_each_other(transformer: Transformer) -> None:
    first, second, third = tokens(150, 1), tokens(9, 2), tokens(70, 3)
    kv = TensorKV(transformer.config, 300)
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    mine = [slots[:150], slots[150:159], slots[200:270]]
    positions = kv.begin([(mine[0][:100], 100), (mine[2][:69], 69)])
    transformer.forward(torch.cat([first[:100], third[:69]]), positions, kv)
    # One batch of a chunk with a prefix, a whole request, one without rows here, and a decode.
    spans = [(mine[0], 50), (mine[1], 9), (mine[0][:30], 0), (mine[2], 1)]
    positions = kv.begin(spans)
    got = transformer.logits(
        transformer.forward(torch.cat([first[100:], second, third[69:]]), positions, kv)
    )
    assert error(got[:50], alone(transformer, first)[100:]) < TOLERANCE
    assert error(got[50:59], alone(transformer, second)) < TOLERANCE
    assert error(got[59:], alone(transformer, third)[69:]) < TOLERANCE


def test_rows_may_be_two_segments_of_a_request(transformer: Transformer) -> None:
    token_ids = tokens(96)
    expected = alone(transformer, token_ids)
    # As a rank of a zigzag split has them: the other rank's tokens are stored, not computed.
    kv = TensorKV(transformer.config, 96)
    kv.begin([(torch.arange(96), 96)])
    transformer.forward(token_ids, torch.arange(96), kv)
    mine = torch.cat([torch.arange(0, 24), torch.arange(72, 96)])
    kv.requests = [Rows(0, 48, torch.arange(96))]
    kv._new_slots = mine
    got = transformer.logits(transformer.forward(token_ids[mine], mine, kv))
    assert error(got, expected[mine]) < TOLERANCE


def test_logits_are_computed_for_the_rows_asked(transformer: Transformer) -> None:
    kv = TensorKV(transformer.config, 20)
    hidden = transformer.forward(tokens(20), kv.begin([(torch.arange(20), 20)]), kv)
    last = transformer.logits(hidden[-1:])
    assert last.shape == (1, transformer.config.vocab_size)
    assert last.dtype == torch.float32
    assert error(last, transformer.logits(hidden)[-1:]) < 1e-6


def test_no_op_ever_sees_the_prompt_squared(checkpoint: Path) -> None:
    largest: dict[str, int] = {"scores": 0, "gathered": 0}

    def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = REFERENCE_OPS.index_scores(q, weights, keys)
        largest["scores"] = max(largest["scores"], scores.numel())
        return scores

    def sparse_attention(
        q_latent: torch.Tensor,
        q_pe: torch.Tensor,
        latent: torch.Tensor,
        k_pe: torch.Tensor,
        valid: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        largest["gathered"] = max(largest["gathered"], latent.numel())
        return REFERENCE_OPS.sparse_attention(q_latent, q_pe, latent, k_pe, valid, scale)

    ops = AttentionOps(index_scores, REFERENCE_OPS.select_topk, sparse_attention)
    count = 2500
    alone(Transformer.load(checkpoint, ops=ops), tokens(count))
    assert largest["scores"] <= 128 * count
    assert largest["gathered"] <= 1 << 22  # 16 MB, whatever the prompt


def test_a_block_scores_only_the_keys_it_can_see(checkpoint: Path) -> None:
    widths: list[int] = []

    def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        widths.append(len(keys))
        return REFERENCE_OPS.index_scores(q, weights, keys)

    ops = dataclasses.replace(REFERENCE_OPS, index_scores=index_scores)
    alone(Transformer.load(checkpoint, ops=ops), tokens(300))
    assert widths == [128, 256, 300] * 2


def test_keys_are_scored_as_they_are_stored_where_ops_take_them_so(checkpoint: Path) -> None:
    class Quantised(TensorKV):
        piece_tokens = 128

        def index_pieces(self, layer: int) -> Iterator[Keys]:
            for piece in super().index_pieces(layer):
                scales = torch.full((len(piece),), 2.0)
                yield dataclasses.replace(piece, quantised=(piece.keys / 2, scales))

    def index_scores_fp8(
        q: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        return REFERENCE_OPS.index_scores(q, weights, codes) * scales

    def logits(kv_class: type[TensorKV], transformer: Transformer) -> torch.Tensor:
        kv = kv_class(transformer.config, 300)
        positions = kv.begin([(torch.arange(300), 300)])
        return transformer.logits(transformer.forward(tokens(300), positions, kv))

    ops = dataclasses.replace(REFERENCE_OPS, index_scores_fp8=index_scores_fp8)
    by_codes = Transformer.load(checkpoint, ops=ops)
    expected = alone(by_codes, tokens(300))  # keys that are stored otherwise go by index_scores
    assert torch.equal(logits(Quantised, by_codes), expected)
    assert torch.equal(logits(Quantised, Transformer.load(checkpoint)), expected)


def test_bf16_runs_and_gives_fp32_logits(checkpoint: Path) -> None:
    narrow = Transformer.load(checkpoint, torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    logits = alone(narrow, tokens(30))
    assert logits.dtype == torch.float32
    assert bool(logits.isfinite().all())


def test_hidden_states_begin_as_embeddings(checkpoint: Path) -> None:
    config = ModelConfig.from_directory(checkpoint)
    weights = load_weights(checkpoint, config, torch.float32)
    none = dataclasses.replace(config, num_hidden_layers=0)
    embedding_only = Transformer(none, dataclasses.replace(weights, layers=()))
    kv = TensorKV(config, 4)
    hidden = embedding_only.forward(tokens(4), kv.begin([(torch.arange(4), 4)]), kv)
    assert torch.equal(hidden, weights.embedding[tokens(4)])


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers 1, 2 and 4 attend to what the layer before them did."""
    directory = tmp_path_factory.mktemp("sharing") / "model"
    indexer = {"index_topk_pattern": "FSSFS"}
    shape = GlmModelShape(num_hidden_layers=5, index_topk=16, index_n_heads=16, indexer=indexer)
    make_tiny_checkpoint(directory, shape, seed=0)
    return directory


def test_a_shared_layer_attends_to_what_the_last_full_layer_selected(sharing: Path) -> None:
    attended: list[torch.Tensor] = []

    class WatchedKV(TensorKV):
        def latent(self, layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert layer == len(attended)
            attended.append(places)
            return super().latent(layer, places)

    transformer = Transformer.load(sharing)
    kv = WatchedKV(transformer.config, 90)
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    transformer.forward(tokens(90), kv.begin([(slots[:20], 20), (slots[20:], 70)]), kv)
    assert torch.equal(attended[1], attended[0])
    assert torch.equal(attended[2], attended[0])
    assert not torch.equal(attended[3], attended[0])
    assert torch.equal(attended[4], attended[3])


def test_a_model_that_shares_selections_computes_in_chunks_as_in_one(sharing: Path) -> None:
    transformer, token_ids = Transformer.load(sharing), tokens(90)
    kv = TensorKV(transformer.config, 90)
    parts = [
        transformer.logits(
            transformer.forward(
                token_ids[stop - size : stop], kv.begin([(torch.arange(stop), size)]), kv
            )
        )
        for stop, size in ((50, 50), (89, 39), (90, 1))
    ]
    assert error(torch.cat(parts), alone(transformer, token_ids)) < TOLERANCE


def test_rows_that_are_brought_some_at_a_time_give_the_same_bits(sharing: Path) -> None:
    transformer, token_ids = Transformer.load(sharing), tokens(90)
    whole = alone(transformer, token_ids)
    kv = TensorKV(transformer.config, 90)
    kv.rows_at_once = 7
    got = transformer.logits(transformer.forward(token_ids, kv.begin([(torch.arange(90), 90)]), kv))
    assert torch.equal(got, whole)


def test_rows_in_parts_make_the_calls_that_all_together_make(
    sharing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, torch.Tensor]] = []

    def sparse_attention(q_latent: torch.Tensor, *others: Any) -> torch.Tensor:
        found = REFERENCE_OPS.sparse_attention(q_latent, *others)
        calls.append((len(q_latent), found))
        return found

    of_a_call = 20 * SHAPE.index_topk * (SHAPE.kv_lora_rank + SHAPE.qk_rope_head_dim)
    like_a_gpu = dataclasses.replace(ON_CPU, most_gathered=of_a_call, whole_calls=True)
    monkeypatch.setattr(query_blocks, "ON_CPU", like_a_gpu)
    ops = dataclasses.replace(REFERENCE_OPS, sparse_attention=sparse_attention)
    transformer, token_ids = Transformer.load(sharing, ops=ops), tokens(90)
    layers = transformer.config.num_hidden_layers
    whole = alone(transformer, token_ids)
    assert [size for size, _ in calls] == [20, 20, 20, 20, 10] * layers
    for rows_at_once, calls_of_layer in ((7, 17), (20, 5), (50, 6)):
        calls.clear()
        kv = TensorKV(transformer.config, 90)
        kv.rows_at_once = rows_at_once
        positions = kv.begin([(torch.arange(90), 90)])
        got = transformer.logits(transformer.forward(token_ids, positions, kv))
        assert torch.equal(got, whole)
        assert len(calls) == calls_of_layer * layers
        assert {size for size, _ in calls} == {20, 10}
        assert all(found.isfinite().all() for _, found in calls)


def test_a_rank_without_tokens_shares_selections_too(sharing: Path) -> None:
    transformer = Transformer.load(sharing)
    kv = TensorKV(transformer.config, 8)
    hidden = transformer.forward(tokens(0), kv.begin([(torch.arange(8), 0)]), kv)
    assert kv.stored_layers == [0, 1, 2, 3, 4]
    assert hidden.shape == (0, 128)
