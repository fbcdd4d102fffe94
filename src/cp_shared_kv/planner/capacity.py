"""What fits on a group: pools of the engine's own arithmetic, for three ways to hold a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cp_shared_kv.engine.budget import (
    capacity_of_rank,
    chunk_scratch_bytes,
    longest_prefix_pages,
    prefix_scratch_bytes,
    sharers,
)
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.config_values import KVCacheDtype
from cp_shared_kv.engine.page_format_names import format_names
from cp_shared_kv.errors import CapacityError, ConfigError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.formats.sections import index_sections, latent_sections
from cp_shared_kv.memory.pool_sizes import PoolSizes
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.planner.gpus import GIB, GPUS
from cp_shared_kv.planner.ranges import check_at_least
from cp_shared_kv.planner.weight_bytes import WeightBytes, WeightSplit

Arrangement = Literal["replicated", "layer split", "shared"]
"""Who stores what: every rank everything; each rank some layers of all tokens, as SGLang's
--enable-dsa-cache-layer-split does; each rank some pages of all layers, as here."""

SCORE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be planned. Either `memory_bytes` of a rank or its `kv_budget_bytes` is given.

    `kv_budget_bytes` is what weights and scratch leave for the pool. ConfigError for values out
    of range.
    """

    model: ModelConfig
    weights: WeightBytes
    split: WeightSplit
    cp_size: int
    memory_bytes: int | None = None
    memory_fraction: float = 0.9
    kv_budget_bytes: int | None = None
    kv_cache_dtype: KVCacheDtype = "bf16"
    page_size: int = 64
    context_length: int | None = None
    chunk_tokens: int = 8192
    prompt_lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.memory_bytes is None) == (self.kv_budget_bytes is None):
            value, change = "two sizes were given", "drop one of the two"
            if self.memory_bytes is None:
                value = "none was given"
                change = f"say --gpu h200, for example; known are {', '.join(GPUS)}"
            raise ConfigError(
                "how much memory a rank has is not clear",
                value=value,
                allowed="one of --gpu, --gpu-memory-gib and --kv-budget-gib",
                change=change,
            )
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                "--mem-fraction-static is out of range",
                value=self.memory_fraction,
                allowed="above 0, at most 1",
            )
        for length in self.prompt_lengths:
            check_at_least("--lengths", length, 1)
        check_at_least("--context-length", self.context_length, 2)
        if (self.context_length or 0) > self.model.context_length:
            raise ConfigError(
                "--context-length exceeds what the model was made for",
                value=self.context_length,
                allowed=f"at most {self.model.context_length} (max_position_embeddings)",
            )

    @property
    def longest_request_tokens(self) -> int:
        """Prompt and answer together."""
        return self.context_length or self.model.context_length

    @property
    def rank_weight_bytes(self) -> int:
        """Weights on each rank."""
        return self.weights.of_rank(self.split)

    def as_plain(self) -> dict[str, Any]:
        """The settings that the plan itself does not repeat, for reports."""
        return {
            "memory_fraction": self.memory_fraction,
            "kv_budget_bytes": self.kv_budget_bytes,
            "kv_cache_dtype": self.kv_cache_dtype,
            "page_size": self.page_size,
            "chunk_tokens": self.chunk_tokens,
            "expert_ranks": self.split.expert_ranks,
            "dense_ranks": self.split.dense_ranks,
        }

    def sizes(self) -> PoolSizes:
        """The page formats' bytes for this model. ConfigError for a format it cannot have."""
        return pool_sizes(self.model, self.kv_cache_dtype, self.page_size)

    def engine_config(self, *, shared: bool) -> EngineConfig:
        """The engine's settings for this group. ConfigError where it would refuse them."""
        several = self.cp_size > 1
        return EngineConfig(
            model_path=Path(self.model.model_type),
            attention_context_parallel_size=self.cp_size,
            enable_nsa_prefill_context_parallel=several,
            enable_nsa_prefill_cp_shared_kv=several and shared,
            page_size=self.page_size,
            chunked_prefill_size=self.chunk_tokens,
            kv_cache_dtype=self.kv_cache_dtype,
        )


@dataclass(frozen=True, kw_only=True)
class ArrangementPlan:
    """What one arrangement gives a group. Bytes are a rank's, `logical_tokens` the group's."""

    arrangement: Arrangement
    kv_bytes_per_token: int
    """On one rank, for each token that it has pages of: all or some of its layers."""
    scratch_bytes: int
    pool_bytes: int
    physical_tokens: int
    """Tokens that one rank has pages of."""
    logical_tokens: int
    longest_prompt_tokens: int
    concurrent_requests: dict[int, int]
    """By prompt length: how many such prompts the pool holds together."""
    index_score_bytes: int
    """Indexer scores of one chunk behind the longest prompt, if made at once: not in the pool."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All arrangements of one group, side by side."""

    cp_size: int
    memory_bytes: int | None
    usable_bytes: int | None
    weight_bytes: int
    parameters: int
    context_length: int
    page_bytes: int
    arrangements: tuple[ArrangementPlan, ...]

    @property
    def activation_bytes(self) -> int | None:
        """What is left for everything that is neither weights nor pool nor scratch."""
        if self.memory_bytes is None or self.usable_bytes is None:
            return None
        return self.memory_bytes - self.usable_bytes


def pool_sizes(model: ModelConfig, kv_cache_dtype: KVCacheDtype, page_size: int) -> PoolSizes:
    """The bytes of a model's pages in the formats that the engine would choose."""
    latent, index = format_names(model.index_head_dim, kv_cache_dtype, computes_in_bf16=True)
    return PoolSizes(
        page_size=page_size,
        latent_row_bytes=sum(latent_sections(latent, model.kv_lora_rank, model.qk_rope_head_dim)),
        index_row_bytes=sum(index_sections(index, model.index_head_dim)),
        num_layers=model.num_hidden_layers,
        index_layers=model.index_layers,
    )


def make_plan(request: PlanRequest) -> Plan:
    """Plan every arrangement. CapacityError when weights, or a single page, do not fit."""
    names: tuple[Arrangement, ...] = ("replicated",)
    if request.cp_size > 1:
        names = ("replicated", "layer split", "shared")
    memory = request.memory_bytes
    usable = None if memory is None else int(memory * request.memory_fraction)
    if usable is not None and usable <= request.rank_weight_bytes:
        raise _weights_do_not_fit(request, usable)
    return Plan(
        cp_size=request.cp_size,
        memory_bytes=memory,
        usable_bytes=usable,
        weight_bytes=request.rank_weight_bytes,
        parameters=request.weights.parameters,
        context_length=request.longest_request_tokens,
        page_bytes=request.sizes().bytes_per_page,
        arrangements=tuple(_arrange(request, name, usable) for name in names),
    )


def layer_split_page_bytes(sizes: PoolSizes, ranks: int) -> int:
    """Bytes of a page on the rank that stores most, where each has a block of layers.

    A rank also keeps one layer of another's as large as its pool, into which whole layers are
    broadcast (SGLang 0.5.16 to 0.5.23). So N ranks hold less than N times the tokens of one.
    """
    base, longer = divmod(sizes.num_layers, ranks)
    start, most = 0, 0
    for rank in range(ranks):
        stop = start + base + (rank < longer)
        index_layers = sum(start <= layer < stop for layer in sizes.index_layers)
        held = (stop - start) * sizes.latent_page_bytes + index_layers * sizes.index_page_bytes
        start, most = stop, max(most, held)
    return most + sizes.layer_page_bytes


def _arrange(request: PlanRequest, name: Arrangement, usable: int | None) -> ArrangementPlan:
    config, sizes = request.engine_config(shared=name == "shared"), request.sizes()
    context, page_size = request.longest_request_tokens, request.page_size
    page_bytes = sizes.bytes_per_page
    if name == "layer split":
        page_bytes = layer_split_page_bytes(sizes, request.cp_size)
    if usable is not None:
        capacity = capacity_of_rank(
            config,
            sizes,
            rank_bytes=usable - request.rank_weight_bytes,
            context_length=context,
            page_bytes=page_bytes,
        )
    else:
        budget = request.kv_budget_bytes or 0
        capacity = KVCapacity.from_budget(budget, page_bytes, page_size, sharers(config))
    prefix_pages = longest_prefix_pages(config, capacity, context)
    longest = min(capacity.logical_tokens, context - 1)
    return ArrangementPlan(
        arrangement=name,
        kv_bytes_per_token=page_bytes // page_size,
        scratch_bytes=chunk_scratch_bytes(config, sizes)
        + prefix_scratch_bytes(config, sizes, prefix_pages),
        pool_bytes=(capacity.physical_pages + 1) * page_bytes,
        physical_tokens=capacity.physical_tokens,
        logical_tokens=capacity.logical_tokens,
        longest_prompt_tokens=longest,
        concurrent_requests={
            length: capacity.logical_pages // -(-length // page_size) if length <= longest else 0
            for length in request.prompt_lengths
        },
        index_score_bytes=-(-request.chunk_tokens // request.cp_size) * longest * SCORE_BYTES,
    )


def _weights_do_not_fit(request: PlanRequest, usable: int) -> CapacityError:
    fp8 = " or --weight-dtype fp8," if request.weights.in_bf16 else ""
    return CapacityError(
        "the weights of a rank leave no room for KV",
        value=f"{request.rank_weight_bytes / GIB:.1f} GiB of weights",
        allowed=f"less than {usable / GIB:.1f} GiB "
        f"({request.memory_fraction:g} of the GPU's memory)",
        change=f"take GPUs with more memory{fp8} or spread the weights further: "
        "--expert-parallel-size, --attention-tensor-parallel-size",
    )
