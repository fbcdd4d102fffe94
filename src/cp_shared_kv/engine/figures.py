"""The figures of all processes, gathered by ticket and joined; what lost lives counted is kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from cp_shared_kv.engine.api import DecodeWorkerStats, EngineRefusal, PoolPages, PrefillGroupStats
from cp_shared_kv.engine.codecs import FromServer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    Check,
    Checked,
    DecodeStats,
    Flush,
    Flushed,
    PageMapRequest,
    PrefillStats,
    StatsRequest,
    ToldPageMap,
)
from cp_shared_kv.engine.page_maps import pool_pages

SILENCE_SECONDS = 10.0
"""A process that has not answered for so long gets no requests; a long batch takes less."""
FIGURES_SECONDS = 3.0
"""How long figures wait for a process that does not answer. The others answer all the while, and
must be asked again before their own silence counts."""

Answer = PrefillStats | DecodeStats | ToldPageMap | Flushed | Checked
Question = Callable[[int], FromServer]
"""Makes the question of a ticket."""


class Figures:
    """Asks processes for their figures. `send` puts a question on the link to a process."""

    def __init__(self, page_size: int, send: Callable[[Life, FromServer], Awaitable[None]]) -> None:
        self._page_size = page_size
        self._send = send
        self._tickets, self._totals = Tickets(), Totals()

    async def gather(
        self, lives: list[Life]
    ) -> tuple[list[PrefillGroupStats], list[DecodeWorkerStats]]:
        """Figures of every process that answers. EngineRefusal if no pair of them does."""
        told = await self._ask(lives, lambda ticket: StatsRequest(ticket=ticket), FIGURES_SECONDS)
        groups = [
            group_stats(life, answer, self._page_size, self._totals)
            for life, answer in told
            if isinstance(answer, PrefillStats)
        ]
        workers = [
            worker_stats(life, answer, self._totals)
            for life, answer in told
            if isinstance(answer, DecodeStats)
        ]
        if not groups or not workers:
            raise EngineRefusal(
                f"no figures from the engine in {FIGURES_SECONDS:.0f} s", kind="unavailable"
            )
        return groups, workers

    async def page_maps(self, lives: list[Life], most_bins: int) -> list[PoolPages]:
        """The page map of every pool whose owner answers, prefill groups first."""
        told = await self._ask(
            lives,
            lambda ticket: PageMapRequest(ticket=ticket, most_bins=most_bins),
            FIGURES_SECONDS,
        )
        pools = [
            pool_pages(life, answer) for life, answer in told if isinstance(answer, ToldPageMap)
        ]
        return sorted(pools, key=lambda pool: (pool.role != "prefill", pool.index))

    async def flush(self, lives: list[Life]) -> int:
        """Have each drop its unused prefixes; how many logical pages those of the prefill groups
        were. EngineRefusal unless all answer."""
        told = await self._ask(lives, lambda ticket: Flush(ticket=ticket), SILENCE_SECONDS)
        if len(told) < len(lives) or not lives:
            raise EngineRefusal(
                f"no answer from the engine in {SILENCE_SECONDS:.0f} s", kind="unavailable"
            )
        return sum(
            answer.pages
            for life, answer in told
            if life.role == "prefill" and isinstance(answer, Flushed)
        )

    async def check(self, lives: list[Life]) -> dict[str, list[str]]:
        """What does not add up in the books of each process, by unit."""
        answers = await self._ask(lives, lambda ticket: Check(ticket=ticket), SILENCE_SECONDS)
        told = {life: answer.problems for life, answer in answers if isinstance(answer, Checked)}
        silent = [f"no answer in {SILENCE_SECONDS:.0f} s"]
        return {life.unit: told.get(life, silent) for life in sorted(lives)}

    def take(self, sender: Life, answer: Answer) -> None:
        """An answer has come."""
        self._tickets.take(sender, answer)

    def lost(self, life: Life) -> None:
        """A life is over: it answers no more, and what it counted is kept."""
        self._tickets.lost(life)
        self._totals.lost(life)

    async def _ask(
        self, lives: list[Life], question: Question, patience_seconds: float
    ) -> list[tuple[Life, Answer]]:
        ticket, answers = self._tickets.open(sorted(lives))
        try:
            for life in answers:
                try:
                    await self._send(life, question(ticket))
                except EngineRefusal:
                    answers[life].cancel()  # it has just gone: the others answer all the same
            if answers:
                await asyncio.wait(answers.values(), timeout=patience_seconds)
            return [
                (life, answer.result())
                for life, answer in answers.items()
                if answer.done() and not answer.cancelled()
            ]
        finally:
            self._tickets.close(ticket)


class Tickets:
    """Questions to several processes: each is answered once by each life it was put to."""

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[int, dict[Life, asyncio.Future[Answer]]] = {}

    def open(self, lives: list[Life]) -> tuple[int, dict[Life, asyncio.Future[Answer]]]:
        """A new question, and a future for each answer. To close when nobody waits any more."""
        self._next += 1
        loop = asyncio.get_running_loop()
        answers: dict[Life, asyncio.Future[Answer]] = {life: loop.create_future() for life in lives}
        self._open[self._next] = answers
        return self._next, answers

    def take(self, sender: Life, answer: Answer) -> None:
        """An answer came; late ones and those nobody asked for are dropped."""
        future = self._open.get(answer.ticket, {}).get(sender)
        if future is not None and not future.done():
            future.set_result(answer)

    def lost(self, life: Life) -> None:
        """This life answers no more."""
        for answers in self._open.values():
            future = answers.get(life)
            if future is not None:
                future.cancel()

    def close(self, ticket: int) -> None:
        """Nobody waits for these answers any more."""
        del self._open[ticket]


class Totals:
    """Counters over all lives of each unit: a life begins at zero, a total only grows."""

    def __init__(self) -> None:
        self._before: dict[str, Counter[str]] = {}
        self._now: dict[str, Counter[str]] = {}

    def joined(self, life: Life, counts: Counter[str]) -> Counter[str]:
        """What this life has counted and all before it."""
        self._now[life.unit] = counts
        return self._before.get(life.unit, Counter()) + counts

    def lost(self, life: Life) -> None:
        """What this life had counted when last asked is kept."""
        counts = self._now.pop(life.unit, None)
        if counts is not None:
            self._before[life.unit] = self._before.get(life.unit, Counter()) + counts


def group_stats(
    life: Life, told: PrefillStats, page_size: int, totals: Totals
) -> PrefillGroupStats:
    """One group's figures as a front end sees them."""
    ranks = len(told.sent_pages_total)
    counts = Counter(
        prompt=told.prompt_tokens_total,
        cached=told.cached_tokens_total,
        evicted=told.evicted_pages_total * page_size,
    )
    for rank in range(ranks):
        counts[f"pages {rank}"] = told.sent_pages_total[rank]
        counts[f"descriptors {rank}"] = told.sent_descriptors_total[rank]
        counts[f"bytes {rank}"] = told.sent_bytes_total[rank]
        counts[f"read {rank}"] = told.read_bytes_total[rank]
    total = totals.joined(life, counts)
    return PrefillGroupStats(
        index=life.index,
        available_tokens=told.available_tokens,
        cached_tokens=told.cached_tokens,
        locked_tokens=told.locked_tokens,
        free_pages_per_owner=told.free_pages_per_owner,
        queued_requests=told.queued,
        running_requests=told.running,
        prompt_tokens_total=total["prompt"],
        cached_tokens_total=total["cached"],
        evicted_tokens_total=total["evicted"],
        sent_pages_total=[total[f"pages {rank}"] for rank in range(ranks)],
        sent_descriptors_total=[total[f"descriptors {rank}"] for rank in range(ranks)],
        sent_bytes_total=[total[f"bytes {rank}"] for rank in range(ranks)],
        read_bytes_total=[total[f"read {rank}"] for rank in range(ranks)],
        scratch_bytes=told.scratch_bytes,
    )


def worker_stats(life: Life, told: DecodeStats, totals: Totals) -> DecodeWorkerStats:
    """One decode worker's figures as a front end sees them."""
    total = totals.joined(
        life, Counter(generated=told.generated_tokens_total, failed=told.failed_transfers_total)
    )
    return DecodeWorkerStats(
        index=life.index,
        used_tokens=told.used_tokens,
        queued_requests=told.waiting,
        running_requests=told.running,
        generated_tokens_total=total["generated"],
        failed_transfers_total=total["failed"],
    )
