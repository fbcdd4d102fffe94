"""The server's client of the engine, against two sockets that play prefill and decode."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
import pytest
import zmq
import zmq.asyncio

from cp_shared_kv.engine import client as client_module
from cp_shared_kv.engine import figures as figures_module
from cp_shared_kv.engine import presence as presence_module
from cp_shared_kv.engine.api import (
    EngineDescription,
    EngineRefusal,
    EngineStats,
    GenerateRequest,
    TokenChunk,
)
from cp_shared_kv.engine.background import beside
from cp_shared_kv.engine.client import ClusterClient
from cp_shared_kv.engine.codecs import FROM_SERVER, encode
from cp_shared_kv.engine.figures import SILENCE_SECONDS
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    Admitted,
    Cancel,
    Check,
    Checked,
    DecodeStats,
    Flush,
    Flushed,
    PageMapRequest,
    Paired,
    PrefillStats,
    ProcessDown,
    Registered,
    RoomRefused,
    StatsRequest,
    Submit,
    Tokens,
    ToldPageMap,
)
from cp_shared_kv.transfer.codec import unpack_int64

M = TypeVar("M", bound=msgspec.Struct)
_addresses = itertools.count()
GROUP, DECODE = Life("prefill", 0, 1), Life("decode", 0, 1)

DESCRIPTION = EngineDescription(
    model_name="tiny",
    version="0",
    context_length=100,
    vocab_size=50,
    eos_token_ids=(0,),
    page_size=4,
    cp_size=2,
    shard_policy="page_interleaved",
    kv_read="pull",
    physical_tokens_per_rank=40,
    logical_tokens=80,
    decode_tokens=80,
    pool_bytes_per_rank=1,
    scratch_limit_bytes=1,
    config={},
)


class Engine:
    """Both processes of the engine, as sockets, and the client that is connected to them."""

    def __init__(self, description: EngineDescription = DESCRIPTION) -> None:
        self.address = f"inproc://engine-client-{next(_addresses)}"
        self.client = ClusterClient(self.address, description)
        self.prefill = self._socket(self.address, GROUP.identity)
        self.decode = self._socket(self.address, DECODE.identity)

    def _socket(self, address: str, identity: bytes) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.linger = 0
        socket.connect(address)
        return socket

    async def start(self) -> None:
        starting = asyncio.create_task(self.client.start())
        await self.prefill.send(encode(Registered()))
        await self.decode.send(encode(Registered()))
        await asyncio.sleep(0.01)
        assert self.client.healthy() == (False, "the engine is starting")
        await self.prefill.send(encode(Paired(decode=str(DECODE))))
        await starting

    async def close(self) -> None:
        await self.client.close()
        self.prefill.close()
        self.decode.close()

    async def next(self, kind: type[M]) -> M:
        """The next message to prefill of a kind."""
        while True:
            message = FROM_SERVER.decode(await self.prefill.recv())
            if isinstance(message, kind):
                return message

    async def nothing_but(self, kind: type[msgspec.Struct]) -> None:
        """Nothing else has been sent to prefill by now."""
        await asyncio.sleep(0.02)
        while await self.prefill.poll(timeout=0):
            assert isinstance(FROM_SERVER.decode(await self.prefill.recv()), kind)

    async def answer(self, ticket: int) -> None:
        await self.prefill.send(encode(prefill_stats(ticket)))
        await self.decode.send(encode(decode_stats(ticket)))


def prefill_stats(ticket: int) -> PrefillStats:
    return PrefillStats(
        ticket=ticket,
        available_tokens=40,
        cached_tokens=24,
        locked_tokens=16,
        free_pages_per_owner=[5, 5],
        queued=1,
        running=2,
        prompt_tokens_total=30,
        cached_tokens_total=8,
        evicted_pages_total=3,
        sent_pages_total=[4, 5],
        sent_descriptors_total=[1, 2],
        sent_bytes_total=[10, 20],
        read_bytes_total=[30, 40],
        scratch_bytes=[7, 7],
        failed_rooms_total=0,
    )


def decode_stats(ticket: int) -> DecodeStats:
    return DecodeStats(
        ticket=ticket,
        available_tokens=60,
        used_tokens=20,
        waiting=3,
        running=4,
        generated_tokens_total=50,
        finished_total=6,
        failed_rooms_total=7,
    )


def request(name: str = "r1", **changes: Any) -> GenerateRequest:
    values: dict[str, Any] = {"request_id": name, "prompt_token_ids": [3, 1, 2], "max_tokens": 5}
    return GenerateRequest(**(values | changes))


def with_engine(test: Callable[[Engine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = Engine()
        try:
            async with asyncio.timeout(20):
                await engine.start()
                await test(engine)
        finally:
            await engine.close()

    asyncio.run(run())


async def collect(engine: Engine, asked: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.client.generate(asked)]


def test_a_request_travels_to_prefill_and_its_tokens_come_back_in_order() -> None:
    async def test(engine: Engine) -> None:
        output = asyncio.create_task(collect(engine, request()))
        submitted = await engine.next(Submit)
        assert unpack_int64(submitted.token_ids).tolist() == [3, 1, 2]
        assert submitted.max_tokens == 5
        room = submitted.room
        await engine.prefill.send(encode(Admitted(room=room, cached_tokens=2)))
        await asyncio.sleep(0.01)
        await engine.decode.send(encode(Tokens(room=room, token_ids=[7])))
        await engine.decode.send(encode(Tokens(room=room, token_ids=[8], finish_reason="stop")))
        assert await output == [TokenChunk([7], None, 2), TokenChunk([8], "stop", 2)]

    with_engine(test)


def test_tokens_that_overtake_the_cached_count_wait_for_it() -> None:
    async def test(engine: Engine) -> None:
        output = asyncio.create_task(collect(engine, request()))
        room = (await engine.next(Submit)).room
        await engine.decode.send(encode(Tokens(room=room, token_ids=[7])))
        await engine.decode.send(encode(Tokens(room=room, token_ids=[8], finish_reason="length")))
        await asyncio.sleep(0.02)
        assert not output.done()
        await engine.prefill.send(encode(Admitted(room=room, cached_tokens=1)))
        assert await output == [TokenChunk([7], None, 1), TokenChunk([8], "length", 1)]

    with_engine(test)


@pytest.mark.parametrize("kind", ["too_long", "overloaded", "failed"])
def test_a_refusal_reaches_the_caller_with_its_kind(kind: Any) -> None:
    async def test(engine: Engine) -> None:
        output = asyncio.create_task(collect(engine, request()))
        room = (await engine.next(Submit)).room
        await engine.prefill.send(encode(RoomRefused(room=room, kind=kind, reason="not today")))
        with pytest.raises(EngineRefusal, match="not today") as refused:
            await output
        assert refused.value.kind == kind
        await engine.client.abort("r1")  # it is over: nothing is sent
        await engine.nothing_but(StatsRequest)

    with_engine(test)


def test_a_caller_that_stops_early_can_still_abort() -> None:
    async def test(engine: Engine) -> None:
        async with aclosing(engine.client.generate(request())) as chunks:
            reading = asyncio.ensure_future(anext(chunks))
            room = (await engine.next(Submit)).room
            await engine.prefill.send(encode(Admitted(room=room, cached_tokens=0)))
            await engine.decode.send(encode(Tokens(room=room, token_ids=[7])))
            assert (await reading).token_ids == [7]
        await engine.client.abort("r1")
        assert await engine.next(Cancel) == Cancel(room=room)
        await engine.client.abort("r1")
        await engine.nothing_but(StatsRequest)
        # What decode still sends of it goes nowhere, and the next request is served.
        await engine.decode.send(encode(Tokens(room=room, token_ids=[], finish_reason="abort")))
        output = asyncio.create_task(collect(engine, request("r2")))
        room = (await engine.next(Submit)).room
        await engine.prefill.send(encode(Admitted(room=room, cached_tokens=0)))
        await engine.decode.send(encode(Tokens(room=room, token_ids=[9], finish_reason="stop")))
        assert await output == [TokenChunk([9], "stop", 0)]

    with_engine(test)


def test_a_cancelled_caller_can_still_abort() -> None:
    async def test(engine: Engine) -> None:
        output = asyncio.create_task(collect(engine, request()))
        room = (await engine.next(Submit)).room
        output.cancel()
        with pytest.raises(asyncio.CancelledError):
            await output
        await engine.client.abort("r1")
        assert await engine.next(Cancel) == Cancel(room=room)

    with_engine(test)


def test_an_abort_of_what_is_over_or_unknown_sends_nothing() -> None:
    async def test(engine: Engine) -> None:
        output = asyncio.create_task(collect(engine, request()))
        room = (await engine.next(Submit)).room
        await engine.prefill.send(encode(Admitted(room=room, cached_tokens=0)))
        await engine.decode.send(encode(Tokens(room=room, token_ids=[7], finish_reason="stop")))
        await output
        await engine.client.abort("r1")
        await engine.client.abort("never heard of")
        await engine.nothing_but(StatsRequest)

    with_engine(test)


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
        asked = asyncio.create_task(engine.client.stats())
        while not asked.done():
            await engine.answer((await engine.next(StatsRequest)).ticket)
            await asyncio.sleep(0.01)
        stats = await asked
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


def test_an_engine_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(client_module, "PING_SECONDS", 0.05)
    monkeypatch.setattr(figures_module, "FIGURES_SECONDS", 0.05)

    async def test(engine: Engine) -> None:
        with pytest.raises(EngineRefusal, match="no figures from the engine") as refused:
            await engine.client.stats()
        assert refused.value.kind == "unavailable"
        while engine.client.healthy()[0]:
            await asyncio.sleep(0.01)
        healthy, why = engine.client.healthy()
        assert not healthy
        assert "has not answered" in why
        with pytest.raises(EngineRefusal, match="has not answered"):
            await collect(engine, request())
        await engine.nothing_but(StatsRequest)

    with_engine(test)


def test_figures_do_not_wait_for_a_process_until_the_others_seem_silent_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert figures_module.FIGURES_SECONDS + client_module.PING_SECONDS < SILENCE_SECONDS
    monkeypatch.setattr(figures_module, "FIGURES_SECONDS", 1.0)

    async def test(engine: Engine) -> None:
        stopped = engine._socket(engine.address, Life("decode", 1, 1).identity)
        await stopped.send(encode(Registered()))
        await asyncio.sleep(0.01)
        asking = asyncio.create_task(engine.client.stats())
        for _ in range(2):  # the ping of the start asks too
            await engine.answer((await engine.next(StatsRequest)).ticket)
        stats = await asyncio.wait_for(asking, timeout=SILENCE_SECONDS / 2)
        assert [worker.index for worker in stats.decode] == [0]
        stopped.close()

    with_engine(test)


def test_an_engine_that_answers_a_ping_is_healthy_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PING_SECONDS", 0.01)

    async def test(engine: Engine) -> None:
        for life in engine.client._presence.lives:
            engine.client._presence.heard(life, time.monotonic() - 1000.0)
        healthy, why = engine.client.healthy()
        assert not healthy
        assert "has not answered for 100" in why
        while not engine.client.healthy()[0]:
            await engine.answer((await engine.next(StatsRequest)).ticket)
            await asyncio.sleep(0.01)
        assert engine.client.healthy() == (True, "ok")

    with_engine(test)


def test_a_message_that_is_none_is_dropped_and_the_next_is_taken() -> None:
    async def test(engine: Engine) -> None:
        output = asyncio.create_task(collect(engine, request()))
        room = (await engine.next(Submit)).room
        await engine.prefill.send(b"\xff not a message")
        await engine.decode.send(encode(Cancel(room=room)))  # not for a server
        await engine.prefill.send(encode(Admitted(room=room, cached_tokens=0)))
        await engine.decode.send(encode(Tokens(room=room, token_ids=[7], finish_reason="stop")))
        assert await output == [TokenChunk([7], "stop", 0)]

    with_engine(test)


def break_at_figures(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next figures that come run into a mistake of ours."""

    def fail(*_arguments: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(figures_module.Figures, "take", fail)


def test_a_client_that_hears_nothing_any_more_ends_what_is_served_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: Engine) -> None:
        break_at_figures(engine, monkeypatch)
        await engine.prefill.send(encode(prefill_stats(1)))
        with pytest.raises(RuntimeError, match="a mistake of ours"):
            await beside(engine.client.tasks, asyncio.sleep(60))

    with_engine(test)


def test_a_start_that_can_hear_nothing_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        engine = Engine()
        break_at_figures(engine, monkeypatch)
        try:
            async with asyncio.timeout(20):
                starting = asyncio.create_task(engine.client.start())
                await engine.prefill.send(encode(prefill_stats(1)))
                with pytest.raises(RuntimeError, match="a mistake of ours"):
                    await starting
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_prompt_too_large_to_send_is_refused_and_forgotten() -> None:
    async def test(engine: Engine) -> None:
        huge = request(prompt_token_ids=range(2**21 + 1))
        with pytest.raises(EngineRefusal, match="cannot send Submit") as refused:
            await collect(engine, huge)
        assert refused.value.kind == "too_long"
        await engine.client.abort("r1")
        await engine.nothing_but(StatsRequest)

    with_engine(test)


def test_a_process_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HOLD_SECONDS", 0.1)

    async def test(engine: Engine) -> None:
        engine.prefill.close()
        await asyncio.sleep(0.05)
        with pytest.raises(EngineRefusal, match="prefill-0 is not connected") as refused:
            await collect(engine, request())
        assert refused.value.kind == "unavailable"

    with_engine(test)


def test_a_flush_is_answered_with_the_pages_dropped() -> None:
    async def test(engine: Engine) -> None:
        flushing = asyncio.create_task(engine.client.flush_cache())
        asked = await engine.next(Flush)
        await engine.prefill.send(encode(Flushed(ticket=asked.ticket + 50, pages=99)))
        await engine.prefill.send(encode(Flushed(ticket=asked.ticket, pages=3)))
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


def test_the_prompts_of_late_are_what_has_been_added_since_the_first_figures() -> None:
    async def told(engine: Engine, prompt: int, cached: int) -> EngineStats:
        asked = asyncio.create_task(engine.client.stats())
        while not asked.done():  # other questions, pings, may come before it
            ticket = (await engine.next(StatsRequest)).ticket
            stats = prefill_stats(ticket)
            await engine.prefill.send(
                encode(
                    msgspec.structs.replace(
                        stats, prompt_tokens_total=prompt, cached_tokens_total=cached
                    )
                )
            )
            await engine.decode.send(encode(decode_stats(ticket)))
            await asyncio.sleep(0.02)
        return await asked

    async def test(engine: Engine) -> None:
        await told(engine, 30, 8)
        stats = await told(engine, 50, 24)
        assert (stats.recent_prompt_tokens, stats.recent_cached_tokens) == (20, 16)

    with_engine(test)


# Processes come and go ---------------------------------------------------------------------------


class Restarted(Engine):
    """The engine after one of its processes was lost and has come back."""

    def down(self, life: Life, reason: str = "it was killed") -> Awaitable[None]:
        return self.client.on_news(ProcessDown(life=str(life), reason=reason))

    async def group_is_back(self) -> zmq.asyncio.Socket:
        socket = self._socket(self.address, GROUP.next().identity)
        await socket.send(encode(Registered()))
        await socket.send(encode(Paired(decode=str(DECODE))))
        return socket


def with_restarts(test: Callable[[Restarted], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = Restarted()
        try:
            async with asyncio.timeout(20):
                await engine.start()
                await test(engine)
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_request_that_is_given_up_while_it_waits_for_another_pair_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "HOLD_SECONDS", 0.1)

    async def test(engine: Restarted) -> None:
        output = asyncio.create_task(collect(engine, request()))
        await engine.next(Submit)
        await engine.down(GROUP)
        with pytest.raises(EngineRefusal) as refused:
            await output
        assert refused.value.kind == "unavailable"
        assert engine.client._open == {}

    with_restarts(test)


def test_a_start_waits_only_a_while_for_others_than_the_pair_that_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "OTHERS_SECONDS", 0.05)

    async def test() -> None:
        engine = Engine(dataclasses.replace(DESCRIPTION, decode_workers=2))
        async with asyncio.timeout(20):
            await engine.start()
        assert engine.client.healthy() == (True, "ok")
        await engine.close()

    asyncio.run(test())


def test_a_queued_request_goes_to_the_next_life_of_its_group() -> None:
    async def test(engine: Restarted) -> None:
        output = asyncio.create_task(collect(engine, request()))
        first = await engine.next(Submit)
        await engine.down(GROUP)
        healthy, why = engine.client.healthy()
        assert not healthy
        assert why == "prefill-0 is starting again: it was killed"
        # Decode may know of it: it is told that nobody waits for this room.
        while not isinstance(told := FROM_SERVER.decode(await engine.decode.recv()), Cancel):
            pass
        assert told.room == first.room
        back = await engine.group_is_back()
        while not isinstance(again := FROM_SERVER.decode(await back.recv()), Submit):
            pass
        assert again.room != first.room
        assert again.token_ids == first.token_ids
        # Late words on the first try go nowhere.
        await engine.decode.send(encode(RoomRefused(room=first.room, kind="failed", reason="no")))
        await back.send(encode(Admitted(room=again.room, cached_tokens=0)))
        await engine.decode.send(
            encode(Tokens(room=again.room, token_ids=[7], finish_reason="stop"))
        )
        assert await output == [TokenChunk([7], "stop", 0)]
        assert engine.client.healthy() == (True, "ok")
        back.close()

    with_restarts(test)


def test_units_tell_their_lives_and_why_one_is_down() -> None:
    async def test(engine: Restarted) -> None:
        group, worker = engine.client.units()
        assert (group.unit, group.life, group.up, group.problems) == ("prefill-0", 1, True, [])
        assert (worker.unit, worker.life, worker.up) == ("decode-0", 1, True)
        assert group.silent_seconds is not None
        await engine.prefill.send(encode(Checked(ticket=0, problems=["page 7 has two owners"])))
        while not engine.client.units()[0].problems:
            await asyncio.sleep(0.01)
        assert engine.client.units()[0].problems == ["page 7 has two owners"]
        await engine.down(GROUP)
        group, worker = engine.client.units()
        assert (group.unit, group.life, group.up) == ("prefill-0", 1, False)
        assert (group.silent_seconds, group.problems) == (None, ["it was killed"])
        assert worker.up
        back = await engine.group_is_back()
        while not engine.client.units()[0].up:
            await asyncio.sleep(0.01)
        group, _ = engine.client.units()
        assert (group.unit, group.life, group.problems) == ("prefill-0", 2, [])
        back.close()

    with_restarts(test)


def test_an_admitted_request_of_a_lost_group_ends_as_decode_says() -> None:
    async def test(engine: Restarted) -> None:
        covered = asyncio.create_task(collect(engine, request("covered")))
        room = (await engine.next(Submit)).room
        partial = asyncio.create_task(collect(engine, request("partial")))
        other = (await engine.next(Submit)).room
        for name in (room, other):
            await engine.prefill.send(encode(Admitted(room=name, cached_tokens=0)))
        await asyncio.sleep(0.02)
        await engine.down(GROUP)
        await engine.decode.send(encode(RoomRefused(room=other, kind="failed", reason="killed")))
        await engine.decode.send(encode(Tokens(room=room, token_ids=[7], finish_reason="stop")))
        assert await covered == [TokenChunk([7], "stop", 0)]
        with pytest.raises(EngineRefusal, match="killed"):
            await partial

    with_restarts(test)


def test_a_lost_decode_worker_fails_only_what_has_had_output() -> None:
    async def test(engine: Restarted) -> None:
        begun = asyncio.create_task(collect(engine, request("begun")))
        room = (await engine.next(Submit)).room
        await engine.prefill.send(encode(Admitted(room=room, cached_tokens=0)))
        await engine.decode.send(encode(Tokens(room=room, token_ids=[7])))
        admitted = asyncio.create_task(collect(engine, request("admitted")))
        second = await engine.next(Submit)
        await engine.prefill.send(encode(Admitted(room=second.room, cached_tokens=0)))
        waits = asyncio.create_task(collect(engine, request("waits")))
        third = await engine.next(Submit)
        while not engine.client._rooms[room].delivered:
            await asyncio.sleep(0.01)
        await engine.down(DECODE, "decode-0 was killed")
        with pytest.raises(EngineRefusal, match="decode-0 was killed") as refused:
            await begun
        assert refused.value.kind == "failed"
        back = engine._socket(engine.address, DECODE.next().identity)
        await back.send(encode(Registered()))
        await engine.prefill.send(encode(Paired(decode=str(DECODE.next()))))
        again = [await engine.next(Submit) for _ in range(2)]
        assert {one.token_ids for one in again} == {second.token_ids, third.token_ids}
        assert {one.decode for one in again} == {str(DECODE.next())}
        assert not {one.room for one in again} & {room, second.room, third.room}
        for task in (admitted, waits):
            task.cancel()
        back.close()

    with_restarts(test)


def test_a_request_under_which_three_lives_are_lost_is_given_up() -> None:
    async def test(engine: Restarted) -> None:
        output = asyncio.create_task(collect(engine, request()))
        for turn in range(3):
            room = (await engine.next(Submit)).room
            await engine.prefill.send(encode(Admitted(room=room, cached_tokens=0)))
            await engine.decode.send(
                encode(RoomRefused(room=room, kind="unavailable", reason=f"loss {turn}"))
            )
        with pytest.raises(EngineRefusal, match=r"lost 3 times .* because loss 2") as refused:
            await output
        assert refused.value.kind == "failed"
        assert engine.client._open == {}

    with_restarts(test)


def test_a_request_waits_for_the_first_word_of_a_worker_that_its_group_has_named() -> None:
    async def test(engine: Restarted) -> None:
        await engine.down(DECODE)
        await engine.prefill.send(encode(Paired(decode=str(DECODE.next()))))
        while not engine.client._router.pairs:
            await asyncio.sleep(0.01)
        output = asyncio.create_task(collect(engine, request()))
        await asyncio.sleep(0.02)
        assert not output.done()
        back = engine._socket(engine.address, DECODE.next().identity)
        await back.send(encode(Registered()))
        assert (await engine.next(Submit)).decode == str(DECODE.next())
        output.cancel()
        back.close()

    with_restarts(test)


def test_totals_keep_what_a_lost_life_had_counted() -> None:
    async def test(engine: Restarted) -> None:
        asked = asyncio.create_task(engine.client.stats())
        while not asked.done():
            await engine.answer((await engine.next(StatsRequest)).ticket)
            await asyncio.sleep(0.01)
        before = await asked
        await engine.down(GROUP)
        back = await engine.group_is_back()
        await asyncio.sleep(0.02)
        asked = asyncio.create_task(engine.client.stats())
        while not asked.done():
            ticket = FROM_SERVER.decode(await back.recv())
            assert isinstance(ticket, StatsRequest)
            await back.send(encode(prefill_stats(ticket.ticket)))
            await engine.decode.send(encode(decode_stats(ticket.ticket)))
            await asyncio.sleep(0.01)
        after = await asked
        assert after.prompt_tokens_total == 2 * before.prompt_tokens_total > 0
        assert after.generated_tokens_total == before.generated_tokens_total
        assert after.restarts_total == {"prefill-0": 1}
        back.close()

    with_restarts(test)


def test_a_word_of_a_life_that_is_over_is_not_heard() -> None:
    async def test(engine: Restarted) -> None:
        await engine.down(GROUP)
        await engine.prefill.send(encode(Registered()))
        await engine.prefill.send(encode(Paired(decode=str(DECODE))))
        await asyncio.sleep(0.05)
        assert not engine.client.healthy()[0]

    with_restarts(test)


def test_books_that_do_not_balance_turn_health_red_until_they_do_or_the_process_is_gone() -> None:
    async def test(engine: Restarted) -> None:
        leak = ["rooms that hold pages are not the running ones: 7"]
        await engine.decode.send(encode(Checked(ticket=0, problems=leak)))
        await asyncio.sleep(0.02)
        assert engine.client.healthy() == (False, f"decode-0: {leak[0]}")
        await engine.decode.send(encode(Checked(ticket=0, problems=[])))
        await asyncio.sleep(0.02)
        assert engine.client.healthy() == (True, "ok")
        await engine.prefill.send(encode(Checked(ticket=0, problems=leak)))
        await asyncio.sleep(0.02)
        assert not engine.client.healthy()[0]
        await engine.down(GROUP)
        assert "leak" not in engine.client.healthy()[1]
        assert "starting again" in engine.client.healthy()[1]

    with_restarts(test)


def test_every_process_is_asked_for_its_books() -> None:
    async def test(engine: Restarted) -> None:
        asked = asyncio.create_task(engine.client.check_invariants())
        ticket = (await engine.next(Check)).ticket
        await engine.prefill.send(encode(Checked(ticket=ticket, problems=[])))
        await engine.decode.send(encode(Checked(ticket=ticket, problems=["a leak"])))
        assert await asked == {"decode-0": ["a leak"], "prefill-0": [], "router": []}

    with_restarts(test)
