"""POST /v1/chat/completions, as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict

import openai
import pytest

EOS = 257
BOS = 256
HELLO = [{"role": "user", "content": "Hello"}]


def create(client, messages=HELLO, **fields):
    return client.chat.completions.create(model="fake-model", messages=messages, **fields)


def prompt_of(engine) -> list[int]:
    return list(engine.requests[-1].prompt_token_ids)


def rendered(*turns: str, open_end: bool = True) -> list[int]:
    ids: list[int] = []
    for turn in turns:
        ids += [BOS, *f"{turn}\n".encode()]
    return [*ids, BOS, *b"assistant:"] if open_end else ids


def test_an_answer_has_the_engines_text_and_openais_fields(client, engine):
    engine.output = [*b"Hi there", EOS]
    answer = create(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hi there")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.id == engine.requests[0].request_id
    assert answer.usage.completion_tokens == 9


def test_messages_become_the_templates_prompt_with_its_special_tokens(client, engine):
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?"},
    ]
    answer = create(client, messages)
    expected = rendered("system:Be brief", "user:2+2?", "assistant:4", "user:sure?")
    assert prompt_of(engine) == expected
    assert answer.usage.prompt_tokens == len(expected)


def test_text_parts_are_joined_by_a_newline(client, engine):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    create(client, [{"role": "user", "content": parts}])
    assert prompt_of(engine) == rendered("user:one\ntwo")


def test_developer_is_openais_newer_name_for_system(client, engine):
    create(client, [{"role": "developer", "content": "Be brief"}])
    assert prompt_of(engine) == rendered("system:Be brief")


def test_the_generation_prompt_can_be_left_out(client, engine):
    create(client, extra_body={"add_generation_prompt": False})
    assert prompt_of(engine) == rendered("user:Hello", open_end=False)


def test_a_stream_is_role_then_text_then_the_end(client, engine):
    engine.output = [*b"Hi", EOS]
    chunks = list(create(client, stream=True))
    deltas = [c.choices[0].delta for c in chunks]
    assert [(d.role, d.content) for d in deltas] == [
        ("assistant", ""),
        (None, "H"),
        (None, "i"),
        (None, None),
    ]
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, None, "stop"]
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_a_stream_with_usage_ends_with_it(client, engine):
    engine.cached_tokens = 4
    chunks = list(create(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 10
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 4
    assert all(c.usage is None for c in chunks[:-1])


def test_a_stream_ends_with_done(http):
    body = {"model": "fake-model", "messages": HELLO, "max_tokens": 1, "stream": True}
    events = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert deltas[-1]["delta"] == {}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_either_name_limits_the_output(client, engine, name):
    assert create(client, **{name: 3}).choices[0].message.content == "the"
    assert engine.requests[0].max_tokens == 3


def test_without_a_limit_the_rest_of_the_room_up_to_1024(client, engine, own_server):
    create(client)
    assert engine.requests[0].max_tokens == 768 - len(rendered("user:Hello"))


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_with_a_stop_string(client, engine, stream):
    engine.outputs = [list(b"one."), list(b"two"), list(b"th.ree")]
    answer = create(client, n=3, stop=".", stream=stream)
    text = defaultdict(str)
    reason = {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            text[choice.index] += (choice.delta if stream else choice.message).content or ""
            reason[choice.index] = choice.finish_reason
    assert text == {0: "one", 1: "two", 2: "th"}
    assert reason == {0: "stop", 1: "length", 2: "stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_in_the_chat_format(client, engine, stream):
    engine.output = [*"a€".encode(), EOS]
    answer = create(client, logprobs=True, top_logprobs=2, stream=stream)
    told = [
        token
        for part in (answer if stream else [answer])
        if part.choices[0].logprobs
        for token in part.choices[0].logprobs.content
    ]
    assert [token.token for token in told] == ["a", "\ufffd", "\ufffd", "\ufffd"]
    assert bytes(b for token in told for b in token.bytes).decode() == "a€"
    assert told[0].logprob == -0.97
    assert [(top.token, top.logprob) for top in told[0].top_logprobs] == [
        ("a", -0.97),
        ("b", -0.98),
    ]


def test_log_probabilities_without_alternatives(client, engine):
    told = create(client, logprobs=True, max_tokens=1).choices[0].logprobs.content
    assert [(token.token, token.top_logprobs) for token in told] == [("t", [])]
    assert engine.requests[0].sampling.logprobs == 0


def test_sampling_reaches_the_engine(client, engine):
    create(client, temperature=0.3, seed=5, extra_body={"min_p": 0.1})
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.min_p) == (0.3, 5, 0.1)


def test_the_async_client_streams_and_waits(server, engine):
    async def main() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
            whole = await create(client)
            parts = [
                part.choices[0].delta.content or ""
                async for part in await create(client, stream=True)
            ]
            return whole.choices[0].message.content, "".join(parts)

    assert asyncio.run(main()) == ("the answer", "the answer")


def test_the_stream_helper_of_openais_client(client, engine):
    engine.output.append(EOS)
    with client.chat.completions.stream(model="fake-model", messages=HELLO) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "the answer"


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "Hello"}, "messages", "array"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is null"),
        ({"messages": [{"content": "x"}]}, "role", "missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "system, developer, user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages", "messages[0].content[0] has type 'image_url'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages", "without text"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages", "weight"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
         "messages", "tool_calls"),
        ({"tools": [{}]}, "tools", "calls no tools"),
        ({"tool_choice": "auto"}, "tool_choice", "calls no tools"),
        ({"functions": [{}]}, "functions", "calls no tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "'text'"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unknown parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"logprobs": 3}, "logprobs", "bool"),
        ({"temperature": -1}, "temperature", "0 to 100"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"prompt": "x"}, "prompt", "unknown parameter"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "at most 512 tokens"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_cannot_be_served_is_named(http, engine, fields, param, words):
    body = {"model": "fake-model", "messages": HELLO, **fields}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert engine.requests == []


def test_neutral_values_are_accepted(client):
    create(
        client,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        logprobs=False,
        top_logprobs=0,
        user="someone",
        store=False,
        metadata={"run": "1"},
    )


def test_a_checkpoint_without_a_template_says_so(own_server, openai_client):
    server, engine = own_server()
    with openai_client(server) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
            create(client)
        assert client.completions.create(model="fake-model", prompt="x").choices[0].text
    assert caught.value.code == "no_chat_template"
    assert len(engine.requests) == 1


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=HELLO)
