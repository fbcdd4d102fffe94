"""The metric catalogue: every name that /metrics serves, with its kind, unit, labels and meaning.

Names under `sglang:` are those of SGLang, so that its dashboards and scripts work. Where SGLang
means the tokens of one rank, these count logical tokens, those of the whole group. Names under
`cpkv:` are our own; `nearest_sglang` and `nearest_vllm` say where others have the same thing, if
they do. Every series carries `model_name` besides the labels below. docs/metrics.md and the Grafana
dashboard take units and meanings from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One family of series. `buckets` are a histogram's upper bounds, ascending, without +Inf."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    nearest_sglang: str = ""
    """What SGLang has instead, for a name of our own; empty where it has nothing."""
    nearest_vllm: str = ""
    """What vLLM has instead; empty where it has nothing."""

    @property
    def sglang(self) -> str:
        """SGLang's name for this, or what it has instead, or nothing."""
        return self.name if self.name.startswith("sglang:") else self.nearest_sglang


def _gauge(
    name: str, unit: str, text: str, *labels: str, sglang: str = "", vllm: str = ""
) -> Metric:
    return Metric(name, "gauge", unit, text, labels, (), sglang, vllm)


def _counter(
    name: str, unit: str, text: str, *labels: str, sglang: str = "", vllm: str = ""
) -> Metric:
    return Metric(name, "counter", unit, text, labels, (), sglang, vllm)


def _histogram(
    name: str, unit: str, text: str, buckets: tuple[float, ...], vllm: str = ""
) -> Metric:
    return Metric(name, "histogram", unit, text, (), buckets, "", vllm)


# Capacity and use of the prefill pool, in logical tokens ---------------------------------------

MAX_TOTAL_NUM_TOKENS = _gauge(
    "sglang:max_total_num_tokens",
    "tokens",
    "Logical KV tokens that the prefill groups hold.",
    vllm="`num_gpu_blocks` * `block_size` of vllm:cache_config_info",
)
NUM_PAGES = _gauge(
    "sglang:num_pages",
    "pages",
    "Logical KV pages that the prefill groups hold.",
    vllm="`num_gpu_blocks` of vllm:cache_config_info",
)
PAGE_SIZE = _gauge(
    "sglang:page_size",
    "tokens",
    "Tokens of a KV page.",
    vllm="`block_size` of vllm:cache_config_info",
)
NUM_USED_TOKENS = _gauge(
    "sglang:num_used_tokens",
    "tokens",
    "Logical KV tokens in use by requests and transfers; cached prefixes that could be evicted "
    "are not counted.",
)
KV_USED_TOKENS = _gauge(
    "sglang:kv_used_tokens", "tokens", "The same figure as sglang:num_used_tokens."
)
KV_AVAILABLE_TOKENS = _gauge(
    "sglang:kv_available_tokens", "tokens", "Logical KV tokens of free pages."
)
KV_EVICTABLE_TOKENS = _gauge(
    "sglang:kv_evictable_tokens", "tokens", "Logical KV tokens of cached prefixes nobody uses."
)
TOKEN_USAGE = _gauge(
    "sglang:token_usage",
    "ratio",
    "sglang:num_used_tokens / sglang:max_total_num_tokens, 0 to 1.",
    vllm="vllm:kv_cache_usage_perc",
)
FULL_TOKEN_USAGE = _gauge(
    "sglang:full_token_usage",
    "ratio",
    "The same figure as sglang:token_usage.",
    vllm="vllm:kv_cache_usage_perc",
)
CACHE_HIT_RATE = _gauge(
    "sglang:cache_hit_rate",
    "ratio",
    "Part of all prompt tokens since the start that were found in the prefix cache, 0 to 1.",
    vllm="vllm:prefix_cache_hits_total / vllm:prefix_cache_queries_total",
)
KV_CACHE_MEMORY_USAGE_GB = _gauge(
    "sglang:kv_cache_memory_usage_gb",
    "GiB",
    "Memory of one rank's physical KV pool.",
    "cp_rank",
)
PHYSICAL_TOKENS_PER_RANK = _gauge(
    "cpkv:physical_tokens_per_rank",
    "tokens",
    "Physical KV tokens that one rank holds.",
    sglang="sglang:max_total_num_tokens of one rank of a sharded group",
)
CP_SIZE = _gauge("cpkv:cp_size", "ranks", "Ranks of a prefill context-parallel group.")
PREFILL_GROUPS = _gauge("cpkv:prefill_groups", "groups", "Prefill groups of this server.")
DECODE_WORKERS = _gauge(
    "cpkv:decode_workers",
    "workers",
    "Decode workers that answer, those that joined from other hosts included.",
)
LONGEST_PROMPT_TOKENS = _gauge(
    "cpkv:longest_prompt_tokens", "tokens", "Longest prompt that can be served."
)
OWNER_FREE_PAGES = _gauge(
    "cpkv:owner_free_pages",
    "pages",
    "Free logical pages that this rank owns.",
    "dp_rank",
    "cp_rank",
    sglang="sglang:kv_available_tokens, without the owner",
)
OWNER_CACHED_PAGES = _gauge(
    "cpkv:owner_cached_pages",
    "pages",
    "Logical pages that this rank owns and that hold cached prefixes nobody uses.",
    "dp_rank",
    "cp_rank",
    sglang="sglang:kv_evictable_tokens, without the owner",
)
OWNER_LOCKED_PAGES = _gauge(
    "cpkv:owner_locked_pages",
    "pages",
    "Logical pages that this rank owns and that requests or transfers use.",
    "dp_rank",
    "cp_rank",
    sglang="sglang:kv_used_tokens, without the owner",
)
SCRATCH_BYTES = _gauge(
    "cpkv:scratch_bytes",
    "bytes",
    "Scratch for prefix reads that this rank holds.",
    "dp_rank",
    "cp_rank",
)
SCRATCH_LIMIT_BYTES = _gauge(
    "cpkv:scratch_limit_bytes", "bytes", "Most scratch for prefix reads that one rank may hold."
)
DECODE_TOKENS = _gauge("cpkv:decode_tokens", "tokens", "KV tokens that one decode worker holds.")
DECODE_USED_TOKENS = _gauge(
    "cpkv:decode_used_tokens", "tokens", "KV tokens that the decode workers have set aside."
)

# Requests --------------------------------------------------------------------------------------

ENGINE_UP = _gauge(
    "cpkv:engine_up", "bool", "1 while the engine can serve; else 0, and its figures are left out."
)
RESTARTS_TOTAL = _counter(
    "cpkv:restarts_total",
    "lives",
    "Lives of a prefill group or decode worker that ended before the server did.",
    "unit",
)
NUM_RUNNING_REQS = _gauge(
    "sglang:num_running_reqs",
    "requests",
    "Requests in prefill, in transfer or in decode.",
    vllm="vllm:num_requests_running",
)
NUM_QUEUE_REQS = _gauge(
    "sglang:num_queue_reqs",
    "requests",
    "Requests not yet admitted to prefill.",
    vllm="vllm:num_requests_waiting",
)
NUM_DECODE_PREALLOC_QUEUE_REQS = _gauge(
    "sglang:num_decode_prealloc_queue_reqs",
    "requests",
    "Requests for which the decode worker has no pages yet.",
)
PREFILL_REQS = _gauge(
    "cpkv:prefill_reqs",
    "requests",
    "Requests in prefill or in transfer.",
    sglang="sglang:num_prefill_inflight_queue_reqs, of those in transfer",
)
DECODE_REQS = _gauge("cpkv:decode_reqs", "requests", "Requests in decode.")
PROMPT_TOKENS_TOTAL = _counter(
    "sglang:prompt_tokens_total",
    "tokens",
    "Prompt tokens of admitted requests.",
    vllm="vllm:prompt_tokens_total, vllm:prefix_cache_queries_total",
)
CACHED_TOKENS_TOTAL = _counter(
    "sglang:cached_tokens_total",
    "tokens",
    "Prompt tokens found in the prefix cache.",
    "cache_source",
    vllm="vllm:prefix_cache_hits_total",
)
GENERATION_TOKENS_TOTAL = _counter(
    "sglang:generation_tokens_total",
    "tokens",
    "Output tokens generated.",
    vllm="vllm:generation_tokens_total",
)
EVICTED_TOKENS_TOTAL = _counter(
    "sglang:evicted_tokens_total", "tokens", "Logical KV tokens evicted from the prefix cache."
)
NUM_REQUESTS_TOTAL = _counter(
    "sglang:num_requests_total",
    "requests",
    "Requests that reached the engine and are over.",
    vllm="vllm:request_success_total over each `finished_reason`",
)
NUM_ABORTED_REQUESTS_TOTAL = _counter(
    "sglang:num_aborted_requests_total",
    "requests",
    "Requests ended early: client gone, /abort_request or timeout.",
    vllm="vllm:request_success_total with `finished_reason` abort",
)
REQUESTS_TOTAL = _counter(
    "cpkv:requests_total",
    "requests",
    "Requests over, by how they ended.",
    "outcome",
    vllm="vllm:request_success_total by `finished_reason`",
)

# Transfer from prefill to decode ---------------------------------------------------------------

NUM_TRANSFER_FAILED_REQS_TOTAL = _counter(
    "sglang:num_transfer_failed_reqs_total",
    "requests",
    "Requests whose KV transfer failed.",
    vllm="vllm:nixl_num_failed_transfers_total",
)
SENT_PAGES_TOTAL = _counter(
    "cpkv:sent_pages_total", "pages", "KV pages this rank sent to decode.", "dp_rank", "cp_rank"
)
SENT_DESCRIPTORS_TOTAL = _counter(
    "cpkv:sent_descriptors_total",
    "descriptors",
    "Contiguous byte ranges that those pages were sent in.",
    "dp_rank",
    "cp_rank",
    vllm="vllm:nixl_num_descriptors, its sum",
)
SENT_BYTES_TOTAL = _counter(
    "cpkv:sent_bytes_total",
    "bytes",
    "KV bytes this rank sent to decode.",
    "dp_rank",
    "cp_rank",
    sglang="sglang:kv_transfer_total_mb, its sum",
    vllm="vllm:nixl_bytes_transferred, its sum",
)
READ_BYTES_TOTAL = _counter(
    "cpkv:read_bytes_total",
    "bytes",
    "Bytes of prefixes that this rank copied into its scratch, those of its own pages among them.",
    "dp_rank",
    "cp_rank",
)

# What clients see ------------------------------------------------------------------------------

_SECONDS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
TIME_TO_FIRST_TOKEN_SECONDS = _histogram(
    "sglang:time_to_first_token_seconds",
    "seconds",
    "From the request's arrival to its first output token.",
    _SECONDS,
    vllm="vllm:time_to_first_token_seconds",
)
INTER_TOKEN_LATENCY_SECONDS = _histogram(
    "sglang:inter_token_latency_seconds",
    "seconds",
    "Between two output tokens of one request.",
    (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
    vllm="vllm:inter_token_latency_seconds",
)
E2E_REQUEST_LATENCY_SECONDS = _histogram(
    "sglang:e2e_request_latency_seconds",
    "seconds",
    "From the request's arrival to its last output token.",
    _SECONDS,
    vllm="vllm:e2e_request_latency_seconds",
)
HTTP_RESPONSES_TOTAL = _counter(
    "cpkv:http_responses_total",
    "responses",
    "HTTP responses by path and status; 499 is a client that went away.",
    "path",
    "status",
)

CATALOGUE: tuple[Metric, ...] = tuple(v for v in globals().values() if isinstance(v, Metric))
"""Every metric, in the order of this page."""

_FIRST_OF_SECTION = {
    "Capacity and use of the prefill pools": MAX_TOTAL_NUM_TOKENS,
    "Requests": ENGINE_UP,
    "Transfer to decode, and reads of the prefix": NUM_TRANSFER_FAILED_REQS_TOTAL,
    "What clients see": TIME_TO_FIRST_TOKEN_SECONDS,
}
_STARTS = [*(CATALOGUE.index(metric) for metric in _FIRST_OF_SECTION.values()), len(CATALOGUE)]
SECTIONS: dict[str, tuple[Metric, ...]] = {
    title: CATALOGUE[start:stop]
    for title, start, stop in zip(_FIRST_OF_SECTION, _STARTS, _STARTS[1:], strict=False)
}
"""The same by subject."""

LABELS = {
    "model_name": "the served model's name; on every series",
    "dp_rank": "number of the prefill group, from 0; SGLang's word for a replica",
    "cp_rank": "rank in its group, from 0; the owner of pages that are counted by owner",
    "cache_source": "where a prefix was found; `device` alone",
    "outcome": "`finished`, `aborted`, `failed` or `refused`",
    "unit": "`prefill-0`, `decode-0` and so on",
    "path": "of the HTTP request; `other` for paths that do not exist",
    "status": "HTTP status; 499 is a client that went away",
}
"""What each label says."""
