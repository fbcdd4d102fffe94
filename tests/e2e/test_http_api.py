"""The HTTP API on a real engine: chats, choices, stop strings, log-probabilities, the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from cp_shared_kv.testing.running_cluster import Running

pytestmark = pytest.mark.e2e
HELLO: Any = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
RENDERED = "[system]\nBe brief<|end|>\n[user]\nHello<|end|>\n[assistant]\n"
PROMPT = "All work and no play makes Jack a dull boy. " * 8
FREE: Any = {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    options = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | FREE
    return client.completions.create(**(options | fields))


def test_a_chat_is_the_completion_of_its_rendered_prompt(client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "max_tokens": 12, "temperature": 0} | FREE
    chat = client.chat.completions.create(messages=HELLO, **options)
    stream = client.chat.completions.create(messages=HELLO, stream=True, **options)
    streamed = "".join(part.choices[0].delta.content or "" for part in stream)
    # The template's end tokens are one token each, in a chat and in a prompt.
    text = client.completions.create(prompt=RENDERED, **options)
    assert chat.choices[0].message.content == streamed == text.choices[0].text
    assert chat.usage is not None
    assert text.usage is not None
    assert chat.usage.prompt_tokens == text.usage.prompt_tokens == len(RENDERED) - 2 * 6


def test_choices_differ_by_their_seeds_and_are_the_same_again(client: openai.OpenAI) -> None:
    fields: Any = {"temperature": 1, "seed": 7, "n": 3}
    first, second = complete(client, **fields), complete(client, **fields)
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in second.choices] == texts
    assert complete(client, temperature=1, seed=7).choices[0].text == texts[0]
    assert first.usage.completion_tokens == 36


def test_later_choices_find_the_prompt_in_the_cache(client: openai.OpenAI, served: Running) -> None:
    served_before = served.get("/server_info").json()["totals"]["cached_tokens"]
    complete(client, prompt="choices " + PROMPT, n=3)
    cached = served.get("/server_info").json()["totals"]["cached_tokens"] - served_before
    assert cached == 2 * (len("choices " + PROMPT) // 64 * 64)


def test_a_stop_string_ends_the_request_in_the_engine_too(
    client: openai.OpenAI, served: Running
) -> None:
    whole = complete(client, max_tokens=40).choices[0].text
    stop = whole[5:8]
    answer = complete(client, max_tokens=4000, stop=stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    deadline = time.monotonic() + 10
    while served.usage()["decode_used_tokens"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert served.usage()["decode_used_tokens"] == 0


def test_greedy_tokens_are_the_likeliest_of_their_log_probabilities(client: openai.OpenAI) -> None:
    told = complete(client, logprobs=3).choices[0].logprobs
    assert len(told.tokens) == 12
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert max(top, key=top.__getitem__) == token
        assert top[token] == logprob < 0


def test_a_flush_makes_the_next_prompt_new(client: openai.OpenAI, served: Running) -> None:
    complete(client)
    assert complete(client).usage.prompt_tokens_details.cached_tokens > 0
    deadline = time.monotonic() + 10
    while served.usage()["used_tokens"] and time.monotonic() < deadline:
        time.sleep(0.05)
    cached = served.usage()["evictable_tokens"]
    evicted = served.get("/dashboard/state").json()["usage"]["evicted_tokens_total"]
    assert served.flush_cache() == {"dropped_pages": cached // 64, "dropped_tokens": cached}
    state = served.get("/dashboard/state").json()
    assert [pool["role"] for pool in state["pools"]] == ["prefill", "decode"]
    assert not any(any(owner["cached"]) for pool in state["pools"] for owner in pool["owners"])
    assert state["usage"]["evicted_tokens_total"] == evicted  # nobody needed their place
    assert complete(client).usage.prompt_tokens_details.cached_tokens == 0


def test_what_operators_ask(served: Running) -> None:
    assert served.get("/health_generate").json() == {"status": "ok"}
    assert served.get("/v1/loads").json()["aggregate"]["total_waiting_reqs"] == 0
    assert "/v1/chat/completions" in served.get("/openapi.json").json()["paths"]
