"""The server's client believes the processes that the supervisor has announced, and no others."""

from __future__ import annotations

import asyncio

import pytest

from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.first_words import MOST_LIVES, MOST_WORDS, FirstWords
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import Paired, Registered, Submit, Tokens
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.engine_sockets import (
    DECODE,
    GROUP,
    Engine,
    collect,
    request,
    with_engine,
)

MADE_UP = Life("prefill", 7, 1)


def test_a_group_that_nobody_announced_gets_no_request_and_is_no_unit() -> None:
    async def test(engine: Engine) -> None:
        stranger = engine.socket(MADE_UP)
        await stranger.send(encode(Registered()))
        await stranger.send(encode(Paired(decode=str(DECODE))))
        await stranger.send(encode(Tokens(room=1, token_ids=[1])))  # not even a first word
        await asyncio.sleep(0.05)
        asked = [asyncio.create_task(collect(engine, request(f"r{i}"))) for i in range(8)]
        for _ in asked:
            await engine.next(Submit)
        assert not await stranger.poll(timeout=50)
        assert {unit.unit for unit in engine.client.units()} == {GROUP.unit, DECODE.unit}
        for task in asked:
            task.cancel()
        stranger.close()

    with_engine(test)


def test_first_words_that_are_faster_than_the_supervisors_count_once_it_has_spoken() -> None:
    async def test(engine: Engine) -> None:
        await engine.down(GROUP)
        back = engine.socket(GROUP.next())
        await back.send(encode(Registered()))
        await back.send(encode(Paired(decode=str(DECODE))))
        await asyncio.sleep(0.05)
        assert not engine.client.healthy()[0]
        await engine.up(GROUP.next())
        assert engine.client.healthy() == (True, "ok")
        back.close()

    with_engine(test)


def test_of_lives_that_wait_the_last_are_kept_and_of_each_so_many_words() -> None:
    words = FirstWords()
    for index in range(MOST_LIVES + 1):
        words.keep(Life("prefill", index, 1), Registered())
    assert words.take(Life("prefill", 0, 1)) == []
    assert words.take(Life("prefill", MOST_LIVES, 1)) == [Registered()]
    assert words.take(Life("prefill", MOST_LIVES, 1)) == []
    for _ in range(MOST_WORDS):
        words.keep(GROUP, Registered())
    with pytest.raises(ProtocolError, match="too many words of a process nobody announced"):
        words.keep(GROUP, Registered())
