"""A request's way through the server's client, to its end or its abort."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from cp_shared_kv.engine.api import EngineRefusal, TokenChunk
from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.messages import Admitted, Cancel, RoomRefused, StatsRequest, Submit, Tokens
from cp_shared_kv.testing.engine_sockets import Engine, collect, request, with_engine
from cp_shared_kv.transfer.codec import unpack_int64


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


def test_a_prompt_too_large_to_send_is_refused_and_forgotten() -> None:
    async def test(engine: Engine) -> None:
        huge = request(prompt_token_ids=range(2**21 + 1))
        with pytest.raises(EngineRefusal, match="cannot send Submit") as refused:
            await collect(engine, huge)
        assert refused.value.kind == "too_long"
        await engine.client.abort("r1")
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
