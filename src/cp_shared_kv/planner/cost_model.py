"""How long a batch takes on a group: stated formulas over rates, no measurement of ours.

For C new tokens on P cached ones, N ranks, L layers of which L_I have an indexer, a layer costs
a rank (DeepSeek-V3.2's shapes give the figures in the tests):

    linear   (C/N) * flops of the token's matrices / linear rate, or the time to read the weights
             that the tokens touch, whichever is longer
    index    (C/N) * (P + C/2) * 2 * HI * dI / index rate                        in L_I layers
    top-k    three passes over the fp32 scores, (C/N) * (P + C) * 4 bytes / HBM  in L_I layers
    MLA      (C/N) * min(k, keys seen) * 2 * H * (2r + dr) / MLA rate
    read     prefix bytes of the layer that other ranks own / link rate; not hidden behind compute
    exchange the chunk's rows from the other ranks / link rate

On GPUs the engine reads whole pages a layer ahead (ADR 0023), which hides part of `read`; here it
is counted in full.

Left out: launches, norms, sampling, the router's all-to-all, waiting for the slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cp_shared_kv.memory.pool_sizes import PoolSizes
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.planner.model_flops import (
    attention_flops_per_pair,
    index_flops_per_pair,
    linear_flops_per_token,
)
from cp_shared_kv.planner.rates import Rates
from cp_shared_kv.planner.weight_bytes import WeightBytes, WeightSplit

SCORE_BYTES = 4
TOPK_PASSES = 3


class Span(NamedTuple):
    """One request's share of a batch, in tokens."""

    prefix: int
    new: int


@dataclass(frozen=True, slots=True)
class BatchSeconds:
    """A batch's time on its group by part, over all layers."""

    linear: float
    index: float
    top_k: float
    mla: float
    read: float
    exchange: float

    @property
    def total(self) -> float:
        """All parts, one after the other."""
        return self.linear + self.index + self.top_k + self.mla + self.read + self.exchange


class CostModel:
    """Times of one prefill group of `cp_size` ranks whose pages have `owners` owners.

    One owner is a replicated pool: every rank has every page, and nothing is read from peers.
    """

    def __init__(
        self,
        model: ModelConfig,
        sizes: PoolSizes,
        rates: Rates,
        weights: WeightBytes,
        split: WeightSplit,
        *,
        cp_size: int,
        owners: int,
    ) -> None:
        self._rates, self._cp_size, self._owners = rates, cp_size, owners
        self._token_bytes = sizes.bytes_per_token
        self._page_bytes = sizes.bytes_per_page
        self._topk = model.index_topk
        layers, index_layers = model.num_hidden_layers, len(model.index_layers)
        self._linear_flops = linear_flops_per_token(model)
        self._index_flops = index_layers * index_flops_per_pair(model)
        self._score_bytes = index_layers * SCORE_BYTES * TOPK_PASSES
        self._mla_flops = layers * attention_flops_per_pair(model)
        self._dense_weight_bytes = weights.other_bytes / split.dense_ranks
        self._expert_weight_bytes = weights.routed_expert_bytes / split.expert_ranks
        self._expert_misses = 1 - model.num_experts_per_tok / model.n_routed_experts

    def batch(self, spans: Iterable[Span], prefix_tokens_read: int) -> BatchSeconds:
        """A batch of these requests, whose prefixes together have so many different tokens."""
        rates, ranks = self._rates, self._cp_size
        new = scored = written = attended = 0.0
        for prefix, count in spans:
            new += count
            scored += count * (prefix + count / 2)
            written += count * (prefix + count)
            attended += attended_keys(prefix, count, self._topk)
        foreign = 1 - 1 / self._owners
        touched = 1 - self._expert_misses**new
        weights = self._dense_weight_bytes + touched * self._expert_weight_bytes
        return BatchSeconds(
            linear=max(
                new / ranks * self._linear_flops / rates.linear_flops, weights / rates.hbm_bytes
            ),
            index=scored / ranks * self._index_flops / rates.index_flops,
            top_k=written / ranks * self._score_bytes / rates.hbm_bytes,
            mla=attended / ranks * self._mla_flops / rates.mla_flops,
            read=foreign * prefix_tokens_read * self._token_bytes / rates.link_bytes,
            exchange=(1 - 1 / ranks) * new * self._token_bytes / rates.link_bytes,
        )

    def transfer_seconds(self, pages: int) -> float:
        """Pages to decode: every owner sends its share at once, a replicated group by one rank."""
        return pages / self._owners * self._page_bytes / self._rates.network_bytes


def attended_keys(prefix: int, new: int, topk: int) -> float:
    """Keys that `new` tokens behind `prefix` attend to: each at most `topk`, itself included."""
    short = min(new, max(0, topk - prefix))  # tokens that see no more than topk keys
    return short * prefix + short * (short + 1) / 2 + (new - short) * topk
