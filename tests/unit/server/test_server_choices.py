"""n choices of one prompt, each a request of its own to the engine."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

import httpx
import openai
import pytest

from cp_shared_kv.engine.api import EngineRefusal

EOS = 257
BODY = {"model": "fake-model", "prompt": "Hello", "n": 3}


def answered(client, stream: bool, **fields):
    """Text and finish reason by choice, and usage."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(**BODY, **fields, stream=stream, **options)
    text, reason = defaultdict(str), {}
    usage = None
    for part in answer if stream else [answer]:
        usage = part.usage or usage
        for choice in part.choices:
            text[choice.index] += choice.text
            reason[choice.index] = choice.finish_reason or reason.get(choice.index)
    return [text[i] for i in range(3)], [reason[i] for i in range(3)], usage


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_has_its_own_text_and_end_and_usage_is_summed(client, engine, stream):
    engine.outputs = [list(b"one"), [*b"two", EOS], list(b"three")]
    engine.cached_tokens = 2
    text, reason, usage = answered(client, stream)
    assert text == ["one", "two", "three"]
    assert reason == ["length", "stop", "length"]
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 3 + 4 + 5)
    assert usage.total_tokens == 5 + 12
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert engine.aborted == []


def test_choices_have_seeds_of_their_own_and_the_first_has_the_given_one(client, engine):
    client.completions.create(**BODY, seed=7)
    client.completions.create(**BODY, seed=7)
    client.completions.create(**BODY, seed=8)
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[:3] == seeds[3:6]
    assert seeds[0] == 7
    assert len({*seeds[:3], *seeds[6:]}) == 6
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_without_a_seed_the_engine_draws_each(client, engine):
    client.completions.create(**BODY)
    assert [request.sampling.seed for request in engine.requests] == [None] * 3


def test_request_ids_differ_and_the_first_is_the_answers(client, engine):
    answer = client.completions.create(**BODY)
    ids = [request.request_id for request in engine.requests]
    assert ids[0] == answer.id
    assert len(set(ids)) == 3


def test_the_others_start_when_the_first_has_computed_the_prompt(server, engine):
    engine.stall_after_tokens = 0
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=0.3)
    assert engine.abort_called.wait(10)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_all_are_aborted_when_the_client_leaves(server, engine, stream):
    engine.stall_after_tokens = 2
    body = BODY | {"stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=1.5)
    deadline = time.monotonic() + 10
    while len(engine.aborted) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    assert len(engine.aborted) == 3


def test_one_that_fails_ends_the_others(client, engine):
    engine.outputs = [list(b"long enough"), list(b"x"), list(b"long enough")]
    engine.refusal = EngineRefusal("rank 2 was lost", kind="failed")
    engine.refuse_after_tokens = 5
    with pytest.raises(openai.InternalServerError, match="rank 2 was lost"):
        client.completions.create(**BODY)


def test_a_stop_string_ends_only_its_own_choice(client, engine):
    engine.outputs = [list(b"a.b"), list(b"cde"), list(b"f.g")]
    text, reason, _ = answered(client, stream=True, stop=".")
    assert text == ["a", "cde", "f"]
    assert reason == ["stop", "length", "stop"]


def test_the_async_client_reads_several_choices(server, engine):
    engine.outputs = [list(b"one"), list(b"two"), list(b"three")]

    async def main() -> dict[int, str]:
        text = defaultdict(str)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
            async for part in await client.completions.create(**BODY, stream=True):
                text[part.choices[0].index] += part.choices[0].text
        return text

    assert asyncio.run(main()) == {0: "one", 1: "two", 2: "three"}
