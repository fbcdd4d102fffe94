"""What OpenAI's own client sees, over a real socket."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

EOS = 257


def test_an_answer_has_the_engines_text_and_openais_fields(client, engine):
    answer = client.completions.create(model="fake-model", prompt="Hello", max_tokens=10)
    assert answer.choices[0].text == "the answer"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.model == "fake-model"
    assert answer.id.startswith("cmpl-")
    assert engine.requests[0].request_id == answer.id
    assert list(engine.requests[0].prompt_token_ids) == list(b"Hello")


def test_usage_counts_prompt_output_and_cached_tokens(client, engine):
    engine.cached_tokens = 3
    usage = client.completions.create(model="fake-model", prompt="Hello", max_tokens=4).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 4, 9)
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_a_stream_adds_up_to_the_whole_answer(client):
    whole = client.completions.create(model="fake-model", prompt="x", max_tokens=10)
    chunks = list(client.completions.create(model="fake-model", prompt="x", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 9 + ["length"]
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_a_stream_with_usage_ends_with_it(client, engine):
    engine.cached_tokens = 2
    chunks = list(
        client.completions.create(
            model="fake-model",
            prompt="Hello",
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 3)
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert all(c.usage is None for c in chunks[:-1])


def test_usage_in_every_chunk_where_asked_for(client):
    chunks = list(
        client.completions.create(
            model="fake-model",
            prompt="Hello",
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    assert [c.usage.completion_tokens for c in chunks] == [1, 2, 3, 3]


def test_a_stream_is_server_sent_events_up_to_done(http):
    body = {"model": "fake-model", "prompt": "x", "max_tokens": 2, "stream": True}
    response = http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"] == [{"text": "t", "finish_reason": None, "index": 0, "logprobs": None}]
    assert "usage" not in first


@pytest.mark.parametrize("stream", [False, True])
def test_the_stopping_token_is_counted_but_not_shown(client, engine, stream):
    engine.output = [*b"ab", EOS, *b"never"]
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(model="fake-model", prompt="x", stream=stream, **options)
    chunks = list(answer) if stream else [answer]
    choices = [c.choices[0] for c in chunks if c.choices]
    assert "".join(c.text for c in choices) == "ab"
    assert choices[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stopping_token_that_is_ordinary_text_is_not_shown_either(own_server, stream):
    server, engine = own_server(eos_token_ids=(ord("!"),))
    engine.output, engine.eos_token_id = list(b"stop!never"), ord("!")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        answer = client.completions.create(model="fake-model", prompt="x", stream=stream)
        choices = [c.choices[0] for c in (answer if stream else [answer])]
    assert "".join(choice.text for choice in choices) == "stop"
    assert choices[-1].finish_reason == "stop"


def test_ignore_eos_reaches_the_engine_and_the_text_goes_on(client, engine):
    engine.output = [*b"ab", EOS, *b"cd"]
    answer = client.completions.create(
        model="fake-model", prompt="x", max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert engine.requests[0].sampling.ignore_eos
    assert answer.choices[0].text == "abcd"
    assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 3, 7])
def test_characters_split_over_tokens_come_whole(client, engine, tokens_per_chunk):
    text = "naïve € 你好 😀 end"
    engine.output = list(text.encode())
    engine.tokens_per_chunk = tokens_per_chunk
    chunks = list(
        client.completions.create(model="fake-model", prompt="x", max_tokens=100, stream=True)
    )
    texts = [c.choices[0].text for c in chunks]
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


def test_a_character_cut_by_max_tokens_is_shown_as_cut_streamed_or_not(client, engine):
    engine.output = list("ab€".encode())
    options = {"model": "fake-model", "prompt": "x", "max_tokens": 4}
    whole = client.completions.create(**options).choices[0].text
    streamed = "".join(c.choices[0].text for c in client.completions.create(**options, stream=True))
    assert whole == streamed == "ab\ufffd"


@pytest.mark.parametrize(
    "prompt", [[72, 105], [[72, 105]], ["Hi"], "Hi"], ids=["ids", "[ids]", "[text]", "text"]
)
def test_one_prompt_in_any_of_its_forms(client, engine, prompt):
    client.completions.create(model="fake-model", prompt=prompt)
    assert list(engine.requests[0].prompt_token_ids) == [72, 105]


def test_without_max_tokens_sixteen_tokens(client, engine):
    client.completions.create(model="fake-model", prompt="x")
    assert engine.requests[0].max_tokens == 16


def test_harmless_fields_are_accepted(client):
    client.completions.create(
        model="fake-model",
        prompt="x",
        best_of=1,
        suffix=None,
        user="someone",
        extra_body={
            "metadata": {"run": "1"},
            "skip_special_tokens": True,
            "no_such_thing": None,
            "max_completion_tokens": 4,
        },
    )


def test_the_async_client_streams_and_waits(server, engine):
    async def main() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
            whole = await client.completions.create(model="fake-model", prompt="x")
            stream = await client.completions.create(model="fake-model", prompt="x", stream=True)
            return whole.choices[0].text, "".join([c.choices[0].text async for c in stream])

    assert asyncio.run(main()) == ("the answer", "the answer")


def test_fifty_requests_at_once_each_get_their_own_answer(server, engine):
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(
                    model="fake-model", prompt="x", max_tokens=1 + number % 10, stream=True
                )
                return "".join([c.choices[0].text async for c in stream])

            return await asyncio.gather(*(one(number) for number in range(50)))

    answers = asyncio.run(main())
    assert answers == ["the answer"[: 1 + number % 10] for number in range(50)]
    assert len({r.request_id for r in engine.requests}) == 50
    assert engine.aborted == []
