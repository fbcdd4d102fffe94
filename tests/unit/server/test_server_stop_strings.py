"""Stop strings: found over token and chunk borders, not shown, and the engine is told to stop."""

from __future__ import annotations

import random

import pytest

from cp_shared_kv.server.stop_strings import StopMatcher

EOS = 257


def cut(text: str, stop: list[str], sizes) -> tuple[str, str | None]:
    """What is shown of a text that comes in pieces of these sizes, and the string that ended it."""
    matcher, shown, at = StopMatcher(stop), "", 0
    while at < len(text) and matcher.matched is None:
        size = sizes()
        shown += matcher.push(text[at : at + size])
        at += size
    return (shown + matcher.flush() if matcher.matched is None else shown), matcher.matched


@pytest.mark.parametrize(
    ("text", "stop", "shown", "matched"),
    [
        ("abcdef", ["cd"], "ab", "cd"),
        ("abcdef", ["x"], "abcdef", None),
        ("abcab", ["abd"], "abcab", None),
        ("aab", ["ab"], "a", "ab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("xabc", ["abc", "b"], "xa", "b"),
        ("xabc", ["c", "bc"], "xa", "bc"),
        ("\n\nQ", ["\n\n"], "", "\n\n"),
        ("ab", ["ab"], "", "ab"),
        ("ab", [], "ab", None),
    ],
)
def test_the_string_that_is_complete_first_ends_the_text(text, stop, shown, matched):
    for size in (1, 2, 3, len(text)):
        assert cut(text, stop, lambda size=size: size) == (shown, matched)


def test_the_result_does_not_depend_on_how_the_text_was_cut():
    rng = random.Random(1)
    for _ in range(500):
        text = "".join(rng.choices("ab", k=12))
        stop = ["".join(rng.choices("ab", k=rng.randint(2, 6))) for _ in range(rng.randint(1, 3))]
        ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
        expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
        assert cut(text, stop, lambda: rng.randint(1, 4))[0] == expected, (text, stop)


def test_what_may_begin_a_stop_string_is_held_back_and_no_more():
    matcher = StopMatcher(["<end>"])
    assert [matcher.push(piece) for piece in ["a<", "e", "n", "x<", "<en"]] == [
        "a", "", "", "<enx", "<"
    ]  # fmt: skip
    assert matcher.flush() == "<en"


# Over HTTP ---------------------------------------------------------------------------------------


def texts(client, stream: bool, **fields):
    answer = client.completions.create(model="fake-model", prompt="x", stream=stream, **fields)
    choices = [c.choices[0] for c in (answer if stream else [answer])]
    return [choice.text for choice in choices], choices[-1].finish_reason


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_ends_before_it_and_the_engine_is_told(client, engine, stream, tokens_per_chunk):
    engine.tokens_per_chunk = tokens_per_chunk
    engine.output = list(b"one two three")
    shown, reason = texts(client, stream, stop="wo t", max_tokens=100)
    assert ("".join(shown), reason) == ("one t", "stop")
    if tokens_per_chunk < 100:
        assert engine.aborted == [engine.requests[0].request_id]
        assert engine.aborted_finished is True
    else:
        assert engine.aborted == []  # it was over anyway


def test_a_stream_never_shows_what_a_stop_string_swallows(client, engine):
    engine.output = list(b"ab<en<end>never")
    shown, reason = texts(client, stream=True, stop=["<end>"], max_tokens=100)
    assert shown[:-1] == ["a", "b", "<en"]
    assert ("".join(shown), reason) == ("ab<en", "stop")


def test_text_that_was_held_back_in_vain_is_shown_at_the_end(client, engine):
    engine.output = list(b"ab<en")
    assert "".join(texts(client, stream=True, stop=["<end>"])[0]) == "ab<en"


def test_stop_strings_are_matched_in_characters_not_in_tokens(client, engine):
    engine.output = list("a€b€€c".encode())
    assert texts(client, stream=False, stop="€€", max_tokens=100) == (["a€b"], "stop")


def test_within_min_tokens_no_stop_string_is_looked_for(client, engine):
    engine.output = list(b"a.b.c.d.")
    shown, reason = texts(client, stream=False, stop=".", extra_body={"min_tokens": 4})
    assert ("".join(shown), reason) == ("a.b.c", "stop")


def test_a_stop_token_is_not_shown_but_counted(client, engine):
    engine.output = list(b"stop!never")
    answer = client.completions.create(
        model="fake-model", prompt="x", extra_body={"stop_token_ids": [ord("!")]}
    )
    assert answer.choices[0].text == "stop"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 5
    assert engine.aborted == []


def test_log_probabilities_end_with_the_text(client, engine):
    engine.output = list(b"ab<en<end>never")
    for stream in (False, True):
        answer = client.completions.create(
            model="fake-model", prompt="x", stop="<end>", logprobs=0, max_tokens=99, stream=stream
        )
        choices = [c.choices[0] for c in (answer if stream else [answer])]
        assert "".join(t for c in choices for t in c.logprobs.tokens) == "ab<en"
        for choice in choices[:-1]:
            assert "".join(choice.logprobs.tokens) == choice.text


def test_a_request_that_a_stop_string_ended_counts_as_answered(http, engine):
    def answered() -> float:
        name = "sglang:e2e_request_latency_seconds_count"
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = answered()
    body = {"model": "fake-model", "prompt": "x", "stop": "answer"}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "the "
    assert answered() == before + 1
