"""What the server's client asks of all processes: figures, page maps, a flush."""

from __future__ import annotations

import asyncio

import pytest

from cp_shared_kv.engine import client as client_module
from cp_shared_kv.engine import figures as figures_module
from cp_shared_kv.engine.api import EngineRefusal, EngineStats
from cp_shared_kv.engine.codecs import FROM_SERVER, encode
from cp_shared_kv.engine.figures import SILENCE_SECONDS
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    Admitted,
    Flush,
    Flushed,
    PageMapRequest,
    Registered,
    RoomRefused,
    StatsRequest,
    Submit,
    Tokens,
    ToldPageMap,
)
from cp_shared_kv.testing.engine_sockets import (
    GROUP,
    Engine,
    collect,
    decode_stats,
    next_at,
    prefill_stats,
    request,
    with_engine,
)


def test_figures_of_both_processes_are_joined_and_outcomes_counted() -> None:
    async def test(engine: Engine) -> None:
        ends = ("finish", "refuse", "fail", "abort", "stop string")
        for name, end in zip("abcde", ends, strict=True):
            output = asyncio.create_task(collect(engine, request(name)))
            room = (await engine.next(Submit)).room
            if end == "finish":
                await engine.prefill.send(encode(Admitted(room=room, cached_tokens=0)))
                await engine.decode.send(
                    encode(Tokens(room=room, token_ids=[7], finish_reason="stop"))
                )
            elif end in ("abort", "stop string"):
                await engine.client.abort(name, finished=end == "stop string")
                output.cancel()
            else:
                kind = "too_long" if end == "refuse" else "failed"
                await engine.prefill.send(encode(RoomRefused(room=room, kind=kind, reason="no")))
            await asyncio.gather(output, return_exceptions=True)
        stats = await engine.figures()
        assert (stats.available_tokens, stats.cached_tokens, stats.used_tokens) == (40, 24, 16)
        assert (stats.queued_requests, stats.prefill_requests) == (1, 2)
        assert (stats.decode_queued_requests, stats.decode_requests) == (3, 4)
        assert stats.decode_used_tokens == 20
        assert (stats.prompt_tokens_total, stats.cached_tokens_total) == (30, 8)
        assert (stats.generated_tokens_total, stats.evicted_tokens_total) == (50, 12)
        assert stats.failed_transfers_total == 7
        assert list(stats.prefill[0].sent_pages_total) == [4, 5]
        assert list(stats.prefill[0].sent_bytes_total) == [10, 20]
        assert list(stats.prefill[0].scratch_bytes) == [7, 7]
        assert stats.requests_total == {"finished": 2, "refused": 1, "failed": 1, "aborted": 1}

    with_engine(test)


def test_figures_do_not_wait_for_a_process_until_the_others_seem_silent_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert figures_module.FIGURES_SECONDS + client_module.PING_SECONDS < SILENCE_SECONDS
    monkeypatch.setattr(figures_module, "FIGURES_SECONDS", 1.0)

    async def test(engine: Engine) -> None:
        stopped = engine.socket(Life("decode", 1, 1))
        await stopped.send(encode(Registered()))
        await asyncio.sleep(0.01)
        asking = asyncio.create_task(engine.client.stats())
        for _ in range(2):  # the ping of the start asks too
            await engine.answer((await engine.next(StatsRequest)).ticket)
        stats = await asyncio.wait_for(asking, timeout=SILENCE_SECONDS / 2)
        assert [worker.index for worker in stats.decode] == [0]
        stopped.close()

    with_engine(test)


def test_the_prompts_of_late_are_what_has_been_added_since_the_first_figures() -> None:
    async def told(engine: Engine, prompt: int, cached: int) -> EngineStats:
        asked = asyncio.create_task(engine.client.stats())
        while not asked.done():  # other questions, pings, may come before it
            ticket = (await engine.next(StatsRequest)).ticket
            stats = prefill_stats(ticket, prompt_tokens_total=prompt, cached_tokens_total=cached)
            await engine.prefill.send(encode(stats))
            await engine.decode.send(encode(decode_stats(ticket)))
            await asyncio.sleep(0.02)
        return await asked

    async def test(engine: Engine) -> None:
        await told(engine, 30, 8)
        stats = await told(engine, 50, 24)
        assert (stats.recent_prompt_tokens, stats.recent_cached_tokens) == (20, 16)

    with_engine(test)


def test_totals_keep_what_a_lost_life_had_counted() -> None:
    async def test(engine: Engine) -> None:
        before = await engine.figures()
        await engine.down(GROUP)
        back = await engine.group_is_back()
        await asyncio.sleep(0.02)
        asked = asyncio.create_task(engine.client.stats())
        while not asked.done():
            asking = FROM_SERVER.decode(await back.recv())
            assert isinstance(asking, StatsRequest)
            await back.send(encode(prefill_stats(asking.ticket)))
            await engine.decode.send(encode(decode_stats(asking.ticket)))
            await asyncio.sleep(0.01)
        after = await asked
        assert after.prompt_tokens_total == 2 * before.prompt_tokens_total > 0
        assert after.generated_tokens_total == before.generated_tokens_total
        assert after.restarts_total == {"prefill-0": 1}
        back.close()

    with_engine(test)


def test_a_flush_is_answered_with_the_pages_dropped() -> None:
    async def test(engine: Engine) -> None:
        flushing = asyncio.create_task(engine.client.flush_cache())
        asked = await engine.next(Flush)
        await engine.prefill.send(encode(Flushed(ticket=asked.ticket + 50, pages=99)))
        await engine.prefill.send(encode(Flushed(ticket=asked.ticket, pages=3)))
        assert (await next_at(engine.decode, Flush)).ticket == asked.ticket
        assert not flushing.done()
        await engine.decode.send(encode(Flushed(ticket=asked.ticket, pages=40)))
        assert await flushing == 3

    with_engine(test)


def test_a_flush_that_is_not_answered_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_module, "SILENCE_SECONDS", 0.05)

    async def test(engine: Engine) -> None:
        with pytest.raises(EngineRefusal, match="no answer from the engine") as refused:
            await engine.client.flush_cache()
        assert refused.value.kind == "unavailable"

    with_engine(test)


def test_page_maps_come_from_every_pool_prefill_groups_first() -> None:
    async def test(engine: Engine) -> None:
        asking = asyncio.create_task(engine.client.page_maps(3))
        asked = await engine.next(PageMapRequest)
        assert asked.most_bins == 3
        told = {"ticket": asked.ticket, "physical_pages": 5, "pages_per_bin": 2}
        await engine.decode.send(
            encode(ToldPageMap(**told, epoch=2**62, free=[[2, 2, 1]], cached=[[0, 0, 0]]))
        )
        await engine.prefill.send(
            encode(
                ToldPageMap(
                    **told, epoch=7, free=[[2, 0, 0], [0, 1, 1]], cached=[[0, 2, 0], [1, 1, 0]]
                )
            )
        )
        group, worker = await asking
        assert (group.unit, group.role, group.epoch) == ("prefill-0", "prefill", 7)
        assert (group.physical_pages, group.pages_per_bin) == (5, 2)
        assert group.free == [[2, 0, 0], [0, 1, 1]]
        assert group.cached == [[0, 2, 0], [1, 1, 0]]
        assert group.locked == [[0, 0, 1], [1, 0, 0]]
        assert (worker.unit, worker.role, worker.epoch) == ("decode-0", "decode", 2**62)
        assert worker.locked == [[0, 0, 0]]

    with_engine(test)


def test_a_pool_whose_owner_is_silent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_module, "FIGURES_SECONDS", 0.05)

    async def test(engine: Engine) -> None:
        assert await engine.client.page_maps(3) == []

    with_engine(test)
