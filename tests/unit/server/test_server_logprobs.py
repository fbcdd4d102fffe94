"""Log-probabilities and echo in the format of OpenAI's completions."""

from __future__ import annotations

import pytest

EOS = 257


def parts(client, stream: bool, **fields):
    answer = client.completions.create(model="fake-model", prompt="Hello", stream=stream, **fields)
    return [part.choices[0] for part in (answer if stream else [answer])]


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_with_its_alternatives_and_its_place(client, engine, stream):
    engine.output = [*b"abc", EOS]
    told = [choice.logprobs for choice in parts(client, stream, logprobs=2)]
    assert [t for part in told for t in part.tokens] == ["a", "b", "c"]
    assert [p for part in told for p in part.token_logprobs] == [-0.97, -0.98, -0.99]
    assert [at for part in told for at in part.text_offset] == [0, 1, 2]
    top = [alternatives for part in told for alternatives in part.top_logprobs]
    assert top == [{"a": -0.97, "b": -0.98}, {"b": -0.98, "c": -0.99}, {"c": -0.99, "d": -1.0}]


def test_zero_tells_the_token_alone(client, engine):
    (choice,) = parts(client, stream=False, logprobs=0, max_tokens=1)
    assert choice.logprobs.top_logprobs == [{"t": -1.16}]


def test_without_them_the_field_is_null(client):
    assert parts(client, stream=False)[0].logprobs is None


def test_parts_of_a_character_are_told_as_bytes_at_the_characters_place(client, engine):
    engine.output = list("a€b".encode())
    for stream in (False, True):
        choices = parts(client, stream, logprobs=0)
        told = [choice.logprobs for choice in choices]
        assert [t for part in told for t in part.tokens] == [
            "a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "b"
        ]  # fmt: skip
        assert [at for part in told for at in part.text_offset] == [0, 1, 1, 1, 2]
        assert "".join(choice.text for choice in choices) == "a€b"


def test_special_and_unknown_alternatives_have_a_name(client, engine):
    engine.output = [255]
    top = parts(client, stream=False, logprobs=4)[0].logprobs.top_logprobs[0]
    assert list(top) == [r"bytes:\xff", "<s>", "</s>", "token_id:258"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hello", list(b"Hello")], ids=["text", "ids"])
def test_echo_puts_the_prompt_in_front(client, stream, prompt):
    answer = client.completions.create(
        model="fake-model", prompt=prompt, echo=True, n=2, max_tokens=3, stream=stream
    )
    text = {0: "", 1: ""}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            text[choice.index] += choice.text
    assert text == {0: "Hellothe", 1: "Hellothe"}
