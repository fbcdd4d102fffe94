"""What the server's client thinks of the engine's health, and of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from cp_shared_kv.engine import client as client_module
from cp_shared_kv.engine import figures as figures_module
from cp_shared_kv.engine import presence as presence_module
from cp_shared_kv.engine.api import EngineRefusal
from cp_shared_kv.engine.background import beside
from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.messages import Check, Checked, StatsRequest
from cp_shared_kv.testing.engine_sockets import (
    DESCRIPTION,
    GROUP,
    Engine,
    collect,
    prefill_stats,
    request,
    with_engine,
)


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


def test_units_tell_their_lives_and_why_one_is_down() -> None:
    async def test(engine: Engine) -> None:
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

    with_engine(test)


def test_books_that_do_not_balance_turn_health_red_until_they_do_or_the_process_is_gone() -> None:
    async def test(engine: Engine) -> None:
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

    with_engine(test)


def test_every_process_is_asked_for_its_books() -> None:
    async def test(engine: Engine) -> None:
        asked = asyncio.create_task(engine.client.check_invariants())
        ticket = (await engine.next(Check)).ticket
        await engine.prefill.send(encode(Checked(ticket=ticket, problems=[])))
        await engine.decode.send(encode(Checked(ticket=ticket, problems=["a leak"])))
        assert await asked == {"decode-0": ["a leak"], "prefill-0": [], "router": []}

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
                await engine.up(GROUP)
                await engine.prefill.send(encode(prefill_stats(1)))
                with pytest.raises(RuntimeError, match="a mistake of ours"):
                    await starting
        finally:
            await engine.close()

    asyncio.run(run())
