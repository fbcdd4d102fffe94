"""/metrics: the catalogue of `telemetry`, filled from the engine's figures and the server's own."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import Metric as MetricFamily
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from cp_shared_kv import telemetry
from cp_shared_kv.engine.api import EngineDescription, EngineStats, PoolPages
from cp_shared_kv.telemetry import Metric

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Labels = tuple[str, ...]
Series = Mapping[Labels, float]
"""Values of one metric by its own labels, in the catalogue's order."""


class Histogram:
    """Counts of observations below the bounds of its metric."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` (in the metric's unit) so many times."""
        self._counts[bisect_left(self.metric.buckets, value)] += count
        self._sum += value * count

    def family(self, model_name: str) -> MetricFamily:
        """The histogram in the form that the exposition takes."""
        metric = self.metric
        bounds = [*metric.buckets, math.inf]
        cumulative: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            cumulative.append(("+Inf" if math.isinf(bound) else repr(float(bound)), total))
        family = HistogramMetricFamily(metric.name, metric.help, labels=["model_name"])
        family.add_metric([model_name], cumulative, self._sum)
        return family


class ServerMetrics:
    """What the HTTP server itself has seen since its start."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(telemetry.TIME_TO_FIRST_TOKEN_SECONDS)
        self.inter_token_latency = Histogram(telemetry.INTER_TOKEN_LATENCY_SECONDS)
        self.request_latency = Histogram(telemetry.E2E_REQUEST_LATENCY_SECONDS)
        self.responses: Counter[tuple[str, str]] = Counter()
        """By path and status."""

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        """All of them, in the catalogue's order."""
        return (self.time_to_first_token, self.inter_token_latency, self.request_latency)


def render(
    description: EngineDescription,
    stats: EngineStats | None,
    pools: Sequence[PoolPages],
    server: ServerMetrics,
    *,
    up: bool,
) -> bytes:
    """The whole page in Prometheus' text format. Without `stats` (the engine does not answer) the
    families that need them are left out; `pools` are those that have told their pages."""
    series: dict[Metric, Series] = {
        telemetry.ENGINE_UP: {(): float(up)},
        telemetry.HTTP_RESPONSES_TOTAL: server.responses,
        **description_series(description),
        **(stats_series(description, stats) if stats is not None else {}),
        **(pages_series(pools) if stats is not None else {}),
    }
    families = [
        _family(metric, values, description.model_name) for metric, values in series.items()
    ]
    families += [histogram.family(description.model_name) for histogram in server.histograms]
    return generate_latest(_Families(families))


def description_series(description: EngineDescription) -> dict[Metric, Series]:
    """Figures that do not change during the engine's life."""
    ranks = range(description.cp_size)
    pool_gib = description.pool_bytes_per_rank / 2**30
    return {
        telemetry.MAX_TOTAL_NUM_TOKENS: {(): description.total_logical_tokens},
        telemetry.NUM_PAGES: {(): description.total_logical_tokens // description.page_size},
        telemetry.PAGE_SIZE: {(): description.page_size},
        telemetry.KV_CACHE_MEMORY_USAGE_GB: {(str(rank),): pool_gib for rank in ranks},
        telemetry.PHYSICAL_TOKENS_PER_RANK: {(): description.physical_tokens_per_rank},
        telemetry.CP_SIZE: {(): description.cp_size},
        telemetry.PREFILL_GROUPS: {(): description.prefill_groups},
        telemetry.LONGEST_PROMPT_TOKENS: {(): description.longest_prompt_tokens},
        telemetry.SCRATCH_LIMIT_BYTES: {(): description.scratch_limit_bytes},
        telemetry.DECODE_TOKENS: {(): description.decode_tokens},
    }


def stats_series(description: EngineDescription, stats: EngineStats) -> dict[Metric, Series]:
    """Figures of the moment."""
    usage = stats.used_tokens / description.total_logical_tokens
    running = stats.prefill_requests + stats.decode_requests
    return {
        telemetry.NUM_USED_TOKENS: {(): stats.used_tokens},
        telemetry.KV_USED_TOKENS: {(): stats.used_tokens},
        telemetry.KV_AVAILABLE_TOKENS: {(): stats.available_tokens},
        telemetry.KV_EVICTABLE_TOKENS: {(): stats.cached_tokens},
        telemetry.TOKEN_USAGE: {(): usage},
        telemetry.FULL_TOKEN_USAGE: {(): usage},
        telemetry.CACHE_HIT_RATE: {(): cache_hit_rate(stats)},
        telemetry.OWNER_FREE_PAGES: _by_rank(stats, "free_pages_per_owner"),
        telemetry.SCRATCH_BYTES: _by_rank(stats, "scratch_bytes"),
        telemetry.DECODE_WORKERS: {(): len(stats.decode)},
        telemetry.DECODE_USED_TOKENS: {(): stats.decode_used_tokens},
        telemetry.NUM_RUNNING_REQS: {(): running},
        telemetry.NUM_QUEUE_REQS: {(): stats.queued_requests},
        telemetry.NUM_DECODE_PREALLOC_QUEUE_REQS: {(): stats.decode_queued_requests},
        telemetry.PREFILL_REQS: {(): stats.prefill_requests},
        telemetry.DECODE_REQS: {(): stats.decode_requests},
        telemetry.PROMPT_TOKENS_TOTAL: {(): stats.prompt_tokens_total},
        telemetry.CACHED_TOKENS_TOTAL: {("device",): stats.cached_tokens_total},
        telemetry.GENERATION_TOKENS_TOTAL: {(): stats.generated_tokens_total},
        telemetry.EVICTED_TOKENS_TOTAL: {(): stats.evicted_tokens_total},
        telemetry.NUM_REQUESTS_TOTAL: {(): sum(stats.requests_total.values())},
        telemetry.NUM_ABORTED_REQUESTS_TOTAL: {(): stats.requests_total.get("aborted", 0)},
        telemetry.REQUESTS_TOTAL: {(o,): count for o, count in stats.requests_total.items()},
        telemetry.NUM_TRANSFER_FAILED_REQS_TOTAL: {(): stats.failed_transfers_total},
        telemetry.SENT_PAGES_TOTAL: _by_rank(stats, "sent_pages_total"),
        telemetry.SENT_DESCRIPTORS_TOTAL: _by_rank(stats, "sent_descriptors_total"),
        telemetry.RESTARTS_TOTAL: {(unit,): n for unit, n in stats.restarts_total.items()},
        telemetry.SENT_BYTES_TOTAL: _by_rank(stats, "sent_bytes_total"),
        telemetry.READ_BYTES_TOTAL: _by_rank(stats, "read_bytes_total"),
    }


def pages_series(pools: Sequence[PoolPages]) -> dict[Metric, Series]:
    """Pages of the prefill groups by owner."""

    def by_owner(state: str) -> Series:
        return {
            (str(pool.index), str(owner)): sum(counts)
            for pool in pools
            if pool.role == "prefill"
            for owner, counts in enumerate(getattr(pool, state))
        }

    return {
        telemetry.OWNER_CACHED_PAGES: by_owner("cached"),
        telemetry.OWNER_LOCKED_PAGES: by_owner("locked"),
    }


def cache_hit_rate(stats: EngineStats) -> float:
    """Part of all prompt tokens so far that the prefix cache held; 0 before the first."""
    return stats.cached_tokens_total / max(1, stats.prompt_tokens_total)


def _by_rank(stats: EngineStats, name: str) -> Series:
    """A figure of every rank, by its group and its place in it."""
    return {
        (str(group.index), str(rank)): value
        for group in stats.prefill
        for rank, value in enumerate(getattr(group, name))
    }


def _family(metric: Metric, series: Series, model_name: str) -> MetricFamily:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=["model_name", *metric.labels])
    for labels, value in series.items():
        family.add_metric([model_name, *labels], value)
    return family


class _Families(Collector):
    """One page's families, as `generate_latest` takes them."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[MetricFamily]:
        return iter(self._families)
