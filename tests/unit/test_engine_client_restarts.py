"""Processes are lost and come back: which requests the server's client begins again."""

from __future__ import annotations

import asyncio

import pytest

from cp_shared_kv.engine import client as client_module
from cp_shared_kv.engine.api import EngineRefusal, TokenChunk
from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.messages import (
    Admitted,
    Cancel,
    Paired,
    Registered,
    RoomRefused,
    Submit,
    Tokens,
)
from cp_shared_kv.testing.engine_sockets import (
    DECODE,
    GROUP,
    Engine,
    collect,
    next_at,
    request,
    with_engine,
)


def test_a_process_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HOLD_SECONDS", 0.1)

    async def test(engine: Engine) -> None:
        engine.prefill.close()
        await asyncio.sleep(0.05)
        with pytest.raises(EngineRefusal, match="prefill-0 is not connected") as refused:
            await collect(engine, request())
        assert refused.value.kind == "unavailable"

    with_engine(test)


def test_a_request_that_is_given_up_while_it_waits_for_another_pair_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "HOLD_SECONDS", 0.1)

    async def test(engine: Engine) -> None:
        output = asyncio.create_task(collect(engine, request()))
        await engine.next(Submit)
        await engine.down(GROUP)
        with pytest.raises(EngineRefusal) as refused:
            await output
        assert refused.value.kind == "unavailable"
        assert engine.client._open == {}

    with_engine(test)


def test_a_queued_request_goes_to_the_next_life_of_its_group() -> None:
    async def test(engine: Engine) -> None:
        output = asyncio.create_task(collect(engine, request()))
        first = await engine.next(Submit)
        await engine.down(GROUP)
        healthy, why = engine.client.healthy()
        assert not healthy
        assert why == "prefill-0 is starting again: it was killed"
        # Decode may know of it: it is told that nobody waits for this room.
        told = await next_at(engine.decode, Cancel)
        assert told.room == first.room
        back = await engine.group_is_back()
        again = await next_at(back, Submit)
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

    with_engine(test)


def test_an_admitted_request_of_a_lost_group_ends_as_decode_says() -> None:
    async def test(engine: Engine) -> None:
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

    with_engine(test)


def test_a_lost_decode_worker_fails_only_what_has_had_output() -> None:
    async def test(engine: Engine) -> None:
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
        back = engine.socket(DECODE.next())
        await engine.up(DECODE.next())
        await back.send(encode(Registered()))
        await engine.prefill.send(encode(Paired(decode=str(DECODE.next()))))
        again = [await engine.next(Submit) for _ in range(2)]
        assert {one.token_ids for one in again} == {second.token_ids, third.token_ids}
        assert {one.decode for one in again} == {str(DECODE.next())}
        assert not {one.room for one in again} & {room, second.room, third.room}
        for task in (admitted, waits):
            task.cancel()
        back.close()

    with_engine(test)


def test_a_request_under_which_three_lives_are_lost_is_given_up() -> None:
    async def test(engine: Engine) -> None:
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

    with_engine(test)


def test_a_request_waits_for_the_first_word_of_a_worker_that_its_group_has_named() -> None:
    async def test(engine: Engine) -> None:
        await engine.down(DECODE)
        await engine.prefill.send(encode(Paired(decode=str(DECODE.next()))))
        while not engine.client._router.pairs:
            await asyncio.sleep(0.01)
        output = asyncio.create_task(collect(engine, request()))
        await asyncio.sleep(0.02)
        assert not output.done()
        back = engine.socket(DECODE.next())
        await engine.up(DECODE.next())
        await back.send(encode(Registered()))
        assert (await engine.next(Submit)).decode == str(DECODE.next())
        output.cancel()
        back.close()

    with_engine(test)


def test_a_word_of_a_life_that_is_over_is_not_heard() -> None:
    async def test(engine: Engine) -> None:
        await engine.down(GROUP)
        await engine.prefill.send(encode(Registered()))
        await engine.prefill.send(encode(Paired(decode=str(DECODE))))
        await asyncio.sleep(0.05)
        assert not engine.client.healthy()[0]

    with_engine(test)
