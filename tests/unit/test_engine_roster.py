"""Who is there and who is lost, as the engine's client hears of it."""

from __future__ import annotations

import asyncio

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.presence import Presence
from cp_shared_kv.engine.roster import Roster
from cp_shared_kv.engine.router import Route, Router

GROUP, DECODE = Life("prefill", 0, 1), Life("decode", 0, 1)
NOW = 100.0


def roster() -> Roster:
    router = Router("longest_prefix", 4, group_pages=10, decode_pages=10)
    return Roster(Presence(NOW), router)


async def stand(one: Roster, group: Life = GROUP, decode: Life = DECODE) -> None:
    """Both have said a word, and are a pair."""
    for life in (group, decode):
        await one.heard(life, NOW)
        await one.registered(life)
    await one.paired(group, decode)


def test_an_engine_is_starting_until_a_pair_stands() -> None:
    async def test() -> None:
        one = roster()
        assert one.healthy(NOW) == (False, "the engine is starting")
        await stand(one)
        assert one.known() == one.answering() == [Route(GROUP, DECODE)]
        assert one.healthy(NOW) == (True, "ok")

    asyncio.run(test())


def test_the_first_problem_of_a_life_is_told_until_it_is_over() -> None:
    async def test() -> None:
        one = roster()
        await stand(one)
        one.checked(DECODE, ["a page too many", "another"])
        assert one.healthy(NOW) == (False, "decode-0: a page too many")
        one.lost(DECODE, "it was killed", final=False)
        assert one.healthy(NOW) == (False, "decode-0 is starting again: it was killed")

    asyncio.run(test())


def test_a_unit_is_down_until_its_next_life_has_said_who_it_is() -> None:
    async def test() -> None:
        one = roster()
        await stand(one)
        one.lost(DECODE, "it was killed", final=False)
        assert [(unit.unit, unit.up) for unit in one.units(NOW)] == [
            ("prefill-0", True),
            ("decode-0", False),
        ]
        await stand(one, decode=DECODE.next())
        assert [(unit.life, unit.up) for unit in one.units(NOW)] == [(1, True), (2, True)]

    asyncio.run(test())


def test_a_unit_that_does_not_come_back_is_forgotten_and_no_restart() -> None:
    async def test() -> None:
        one = roster()
        await stand(one)
        one.lost(DECODE, "it was stopped", final=True)
        assert [unit.unit for unit in one.units(NOW)] == ["prefill-0"]
        assert one.restarts["decode-0"] == 0

    asyncio.run(test())


def test_a_loss_that_is_told_twice_is_one_restart() -> None:
    one = roster()
    one.lost(DECODE, "it was killed", final=False)
    one.lost(DECODE, "it was killed", final=False)
    assert one.restarts == {"decode-0": 1}
    assert one.is_lost(DECODE)
    assert not one.is_lost(DECODE.next())


def test_a_group_may_name_a_worker_that_is_lost_already() -> None:
    async def test() -> None:
        one = roster()
        one.lost(DECODE, "it was killed", final=False)
        await one.heard(GROUP, NOW)
        await one.paired(GROUP, DECODE)
        assert one.known() == []

    asyncio.run(test())


def test_whoever_waits_for_a_pair_gets_it_when_its_last_end_is_heard() -> None:
    async def test() -> None:
        one = roster()
        waits = asyncio.create_task(one.until(one.known))
        await one.heard(GROUP, NOW)
        await one.paired(GROUP, DECODE)
        await asyncio.sleep(0)
        assert not waits.done()
        await one.heard(DECODE, NOW)
        assert await asyncio.wait_for(waits, 10) == [Route(GROUP, DECODE)]

    asyncio.run(test())
