"""OpenAI's own client, unmodified: chats, streams, log-probabilities, choices, its async half."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from cp_shared_kv.testing.running_cluster import Running

pytestmark = pytest.mark.e2e
HELLO: Any = [{"role": "user", "content": "Hello"}]
CHAT: Any = {
    "model": "demo",
    "messages": HELLO,
    "max_completion_tokens": 12,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
LONG: Any = CHAT | {"max_completion_tokens": 8000, "stream": True}
TOOL: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    ) as client:
        yield client


def async_client(served: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False),
    )


def test_a_streamed_chat_ends_with_the_usage_of_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    *pieces, last = client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_clients_own_stream_helper_puts_the_chat_together(client: openai.OpenAI) -> None:
    # An end by length is an error to this helper, so a stop string has to make one.
    stop = client.chat.completions.create(**CHAT).choices[0].message.content[4:6]
    fields = CHAT | {"stop": stop, "logprobs": True}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        stream.until_done()
        put_together = stream.get_final_completion()
    assert put_together.choices[0].finish_reason == "stop"
    assert put_together.choices[0].message.content == whole.choices[0].message.content
    assert put_together.choices[0].logprobs == whole.choices[0].logprobs


def test_log_probabilities_of_a_chat_are_one_a_token_and_the_likeliest_first(
    client: openai.OpenAI,
) -> None:
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    told = answer.choices[0].logprobs.content
    assert len(told) == 12
    for token in told:
        assert len(token.top_logprobs) == 3
        # Greedy: the token is the likeliest.
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (
            token.token,
            token.logprob,
        )


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_chat_come_by_their_index(client: openai.OpenAI, stream: bool) -> None:
    fields = CHAT | {"n": 3, "temperature": 1, "seed": 5}
    whole = client.chat.completions.create(**fields)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) == len(texts) == 3
    if stream:
        streamed = dict.fromkeys(texts, "")
        for piece in client.chat.completions.create(**fields, stream=True):
            for choice in piece.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio", "text"]}, "modalities"),
    ],
)
def test_what_is_not_built_is_refused_by_its_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**CHAT, **fields)
    assert refused.value.param == param
    assert refused.value.code == "unsupported_value"
    assert "allowed" in refused.value.message


def test_the_async_client_gets_many_answers_at_once(served: Running) -> None:
    async def ask() -> list[Any]:
        async with async_client(served) as client:
            chats = [client.chat.completions.create(**CHAT, seed=at) for at in range(6)]
            return await asyncio.gather(*chats)

    answers = asyncio.run(ask())
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert all(answer.usage.completion_tokens == 12 for answer in answers)


def test_a_closed_stream_of_the_async_client_frees_its_pages(served: Running) -> None:
    async def begin_and_close() -> None:
        async with async_client(served) as client:
            stream = await client.chat.completions.create(**LONG)
            await anext(aiter(stream))
            assert served.usage()["decode_used_tokens"] > 0
            await stream.close()

    asyncio.run(begin_and_close())
    served.until_nothing_is_held()


def test_a_cancelled_request_of_the_async_client_frees_its_pages(served: Running) -> None:
    async def begin_and_cancel() -> None:
        async with async_client(served) as client:
            whole = LONG | {"stream": False}
            task = asyncio.create_task(client.chat.completions.create(**whole))
            await asyncio.to_thread(served.until, decode_requests=1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(begin_and_cancel())
    served.until_nothing_is_held()
