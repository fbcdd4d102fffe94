"""Limits of a request, by what the engine holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cp_shared_kv.errors import RequestTooLongError
from cp_shared_kv.server.request_limits import RequestLimits
from cp_shared_kv.testing.fake_engine import DESCRIPTION


def limits(**sizes: int) -> RequestLimits:
    return RequestLimits(replace(DESCRIPTION, **sizes))


def test_a_request_that_fills_every_limit_fits():
    assert limits().output_tokens(512, 256) == 256
    assert limits(logical_tokens=1024, decode_tokens=2048).output_tokens(1000, 24) == 24


def test_the_prefill_group_holds_the_prompt_alone():
    assert limits(decode_tokens=1024).output_tokens(512, 512) == 512


@pytest.mark.parametrize(
    ("sizes", "prompt", "max_tokens", "limit", "name"),
    [
        ({}, 513, 1, 512, "logical KV capacity of the prefill group"),
        ({}, 2000, 1, 512, "logical KV capacity of the prefill group"),
        ({"decode_tokens": 512}, 513, 1, 512, "logical KV capacity of the prefill group"),
        ({}, 512, 257, 768, "KV capacity of the decode worker"),
        ({"decode_tokens": 4096}, 512, 513, 1024, "context length"),
        ({"context_length": 300}, 300, None, 300, "context length"),
        ({"decode_tokens": 256}, 256, None, 256, "KV capacity of the decode worker"),
    ],
)
def test_the_least_limit_in_the_way_is_named(sizes, prompt, max_tokens, limit, name):
    with pytest.raises(RequestTooLongError) as caught:
        limits(**sizes).output_tokens(prompt, max_tokens)
    assert (caught.value.limit, caught.value.limit_name) == (limit, name)
    assert f"{prompt} tokens" in str(caught.value)


def test_the_default_output_shrinks_to_the_room_that_is_left():
    assert limits().output_tokens(100, None) == 16
    assert limits(context_length=300).output_tokens(290, None) == 10
    assert limits(context_length=300).output_tokens(299, None) == 1


def test_the_longest_prompt_of_the_description_is_the_longest_that_fits():
    for sizes in ({}, {"decode_tokens": 200}, {"context_length": 100}):
        longest = replace(DESCRIPTION, **sizes).longest_prompt_tokens
        assert limits(**sizes).output_tokens(longest, 1) == 1
        with pytest.raises(RequestTooLongError):
            limits(**sizes).output_tokens(longest + 1, 1)


def test_the_body_limit_leaves_room_for_every_prompt_that_fits():
    longest = limits(context_length=1_000_000)
    assert longest.body_bytes > 1_000_000 * len("129279, ")
    assert limits().body_bytes < 50 * 2**20
