"""Requests of exactly what fits, and of one token more: by the pool of the prefill group, by
decode's pool, by the context."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cp_shared_kv.testing.client_load import body
from cp_shared_kv.testing.running_cluster import CP_SIZE, Running, small_config
from cp_shared_kv.testing.running_cluster import running as start_cluster

pytestmark = pytest.mark.e2e

PHYSICAL_TOKENS = 512
LOGICAL_TOKENS = CP_SIZE * PHYSICAL_TOKENS
DECODE_TOKENS = LOGICAL_TOKENS + 64
CONTEXT_TOKENS = LOGICAL_TOKENS - 40  # not a whole number of pages
LOGICAL = "logical KV capacity of the prefill group"
DECODE = "KV capacity of the decode worker"
CONTEXT = "context length"


def start(directory: Any, **changes: Any) -> Iterator[Running]:
    config = small_config(
        max_total_tokens=PHYSICAL_TOKENS, decode_max_total_tokens=DECODE_TOKENS, **changes
    )
    with start_cluster(config, directory / "cluster.log") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def by_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from start(tmp_path_factory.mktemp("pools"))


@pytest.fixture(scope="module")
def by_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from start(tmp_path_factory.mktemp("context"), context_length=CONTEXT_TOKENS)


def ask(served: Running, prompt_tokens: int, max_tokens: int, **extra: Any) -> Any:
    text = f"{prompt_tokens} and {max_tokens} ".ljust(prompt_tokens, ".")[:prompt_tokens]
    return served.post(body(text, max_tokens) | extra)


def assert_served(served: Running, prompt_tokens: int, max_tokens: int) -> None:
    answer = ask(served, prompt_tokens, max_tokens)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, max_tokens)
    served.until_nothing_is_held()


def assert_refused(
    served: Running, prompt_tokens: int, max_tokens: int, limit: int, name: str
) -> None:
    """At once, by the server, with the limit and its name; and the next request is served."""
    for stream in (False, True):
        answer = ask(served, prompt_tokens, max_tokens, stream=stream)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert f"at most {limit} tokens ({name})" in error["message"]
    served.until_nothing_is_held()
    assert ask(served, 5, 1).status_code == 200


def test_the_prefill_groups_pool(by_pools: Running) -> None:
    assert_served(by_pools, LOGICAL_TOKENS, 2)
    assert_refused(by_pools, LOGICAL_TOKENS + 1, 2, LOGICAL_TOKENS, LOGICAL)


@pytest.mark.parametrize("prompt_tokens", [LOGICAL_TOKENS, LOGICAL_TOKENS - 13])
def test_decodes_pool(by_pools: Running, prompt_tokens: int) -> None:
    left = DECODE_TOKENS - prompt_tokens
    assert_served(by_pools, prompt_tokens, left)
    assert_refused(by_pools, prompt_tokens, left + 1, DECODE_TOKENS, DECODE)


def test_the_context(by_context: Running) -> None:
    assert_served(by_context, CONTEXT_TOKENS - 1, 1)
    assert_served(by_context, CONTEXT_TOKENS - 30, 30)
    assert_refused(by_context, CONTEXT_TOKENS, 1, CONTEXT_TOKENS, CONTEXT)
    assert_refused(by_context, CONTEXT_TOKENS - 30, 31, CONTEXT_TOKENS, CONTEXT)


def test_a_prompt_that_leaves_no_room_for_the_default_output_gets_what_is_left(
    by_context: Running,
) -> None:
    fields = body("left ".ljust(CONTEXT_TOKENS - 3, "."), 1)
    del fields["max_tokens"]
    answer = by_context.post(fields)
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_several_of_the_largest_at_once_take_their_turns(by_pools: Running) -> None:
    with ThreadPoolExecutor(4) as clients:
        answers = clients.map(lambda less: ask(by_pools, LOGICAL_TOKENS - less, 2), range(4))
        assert [answer.status_code for answer in answers] == [200] * 4
    by_pools.until_nothing_is_held()
