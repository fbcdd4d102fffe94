"""A prompt larger than one rank, over HTTP, as clients see it."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from cp_shared_kv.testing.running_cluster import CP_SIZE, PHYSICAL_TOKENS, Running

pytestmark = pytest.mark.e2e

LOGICAL_TOKENS = CP_SIZE * PHYSICAL_TOKENS
TEXT = "".join(f"clause {i}: the licensee may do thing {i * i % 97}. " for i in range(200))


def prompt(tokens: int, start: str = "") -> str:
    """A prompt of exactly so many byte tokens."""
    return (start + TEXT)[:tokens]


@pytest.fixture(scope="session")
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=60,
        http_client=httpx.Client(trust_env=False),
    )


def complete(client: openai.OpenAI, text: str, max_tokens: int = 8, **extra: Any) -> Any:
    return client.completions.create(
        model="demo",
        prompt=text,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
        **extra,
    )


def settled(served: Running) -> dict[str, Any]:
    """The use of the pool once no request holds a page any more."""
    for _ in range(100):
        usage = served.usage()
        if usage["used_tokens"] == usage["decode_used_tokens"] == 0:
            return usage
        time.sleep(0.1)
    pytest.fail(f"pages are still in use: {usage}")


def test_a_prompt_larger_than_one_rank_is_answered(client: openai.OpenAI, served: Running) -> None:
    answer = complete(client, prompt(1500, "large "))
    assert answer.usage.prompt_tokens == 1500 > PHYSICAL_TOKENS
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


def test_the_same_prompt_again_reuses_its_pages_and_says_so(
    client: openai.OpenAI, served: Running
) -> None:
    first = complete(client, prompt(1000, "again "))
    second = complete(client, prompt(1000, "again "))
    assert second.choices[0].text == first.choices[0].text
    # Every full page but the last token's own, which must be computed.
    assert second.usage.prompt_tokens_details.cached_tokens == 999 // 64 * 64


def test_a_full_prefix_hit_still_computes_one_token(client: openai.OpenAI, served: Running) -> None:
    first = complete(client, prompt(640, "full "))
    second = complete(client, prompt(640, "full "))
    assert second.choices[0].text == first.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens == 576


def test_streaming_gives_the_same_text_as_not_streaming(
    client: openai.OpenAI, served: Running
) -> None:
    whole = complete(client, prompt(200, "stream "), 12)
    stream = complete(
        client, prompt(200, "stream "), 12, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for event in stream:
        text += event.choices[0].text if event.choices else ""
        usage = event.usage or usage
    assert text == whole.choices[0].text
    assert usage is not None
    assert usage.completion_tokens == 12


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 128])
def test_short_prompts_leave_ranks_without_pages_or_tokens(
    client: openai.OpenAI, served: Running, tokens: int
) -> None:
    assert complete(client, prompt(tokens, "s"), 3).usage.completion_tokens == 3


def test_one_output_token_needs_no_decode_step(client: openai.OpenAI, served: Running) -> None:
    assert complete(client, prompt(100, "one "), 1).usage.completion_tokens == 1


def test_requests_at_once_give_the_answers_they_give_alone(
    client: openai.OpenAI, served: Running
) -> None:
    prompts = [prompt(150 + 170 * i, f"{i % 3} ") for i in range(8)]
    alone = [complete(client, text, 6).choices[0].text for text in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: complete(client, text, 6), prompts))
    assert [answer.choices[0].text for answer in together] == alone


def test_equal_prompts_at_once_are_computed_once(client: openai.OpenAI, served: Running) -> None:
    text = prompt(500, "equal ")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: complete(client, text, 4), range(4)))
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert sorted(cached) == [0, *[499 // 64 * 64] * 3]
    assert len({answer.choices[0].text for answer in answers}) == 1


def test_more_prompts_than_fit_at_once_are_all_answered(
    client: openai.OpenAI, served: Running
) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda i: complete(client, prompt(900, f"q{i} "), 4), range(10)))
    assert all(answer.usage.completion_tokens == 4 for answer in answers)
    usage = settled(served)
    assert usage["available_tokens"] + usage["evictable_tokens"] == LOGICAL_TOKENS


def test_a_prompt_of_exactly_the_capacity_is_served(client: openai.OpenAI, served: Running) -> None:
    assert complete(client, prompt(LOGICAL_TOKENS, "exact "), 2).usage.completion_tokens == 2


def test_one_token_more_is_refused_at_once_and_the_next_is_served(
    client: openai.OpenAI, served: Running
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, prompt(LOGICAL_TOKENS + 1, "over "))
    assert str(LOGICAL_TOKENS) in str(refused.value)
    assert "logical" in str(refused.value)
    assert complete(client, prompt(80, "next "), 2).usage.completion_tokens == 2


def test_a_client_that_goes_away_frees_its_pages(served: Running) -> None:
    body = {
        "model": "demo",
        "prompt": prompt(700, "gone "),
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{served.url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()  # kept: a dropped iterator closes the connection
        assert next(lines).startswith("data: ")
        assert served.usage()["decode_used_tokens"] > 0
    settled(served)


def test_a_client_that_goes_away_during_prefill_frees_its_pages(served: Running) -> None:
    body = {"model": "demo", "prompt": prompt(2000, "early "), "max_tokens": 4}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json=body, trust_env=False, timeout=0.15)
    settled(served)


def test_log_metrics_and_server_info_agree_in_logical_tokens(
    client: openai.OpenAI, served: Running
) -> None:
    complete(client, prompt(300, "agree "))
    usage = settled(served)
    info = served.get("/server_info").json()
    metrics = served.get("/metrics").text
    total = re.search(r"^sglang:max_total_num_tokens\S* (\S+)", metrics, re.M)
    cached = re.search(r"^sglang:kv_evictable_tokens\S* (\S+)", metrics, re.M)
    assert total is not None
    assert cached is not None
    assert float(total[1]) == info["max_total_num_tokens"] == LOGICAL_TOKENS
    assert float(cached[1]) == usage["evictable_tokens"]
    enabled = (
        f"CP shared KV enabled. physical_tokens_per_rank={PHYSICAL_TOKENS}, "
        f"logical_tokens={LOGICAL_TOKENS}, cp_size=2, shard_policy=page_interleaved"
    )
    capacity = (
        f"CP shared KV scheduler capacity: logical_tokens={LOGICAL_TOKENS}, "
        f"physical_tokens_per_rank={PHYSICAL_TOKENS}, cp_size=2"
    )
    assert served.log_lines("CP shared KV enabled") == [enabled]
    assert served.log_lines("CP shared KV scheduler") == [capacity]


def transfers(served: Running, since: int) -> list[tuple[int, int, int]]:
    """Rank, pages and descriptors of each transfer logged behind the first `since`."""
    pattern = r"CP shared KV transfer: rank=(\d) sent pages=(\d+) descriptors=(\d+) bytes=(?:\d+)"
    found = [
        re.fullmatch(pattern, line) for line in served.log_lines("CP shared KV transfer")[since:]
    ]
    return [(int(m[1]), int(m[2]), int(m[3])) for m in found if m]


def test_each_transfer_logs_one_line_a_rank_and_pages_add_up(
    client: openai.OpenAI, served: Running
) -> None:
    before = len(served.log_lines("CP shared KV transfer"))
    complete(client, prompt(700, "lines "))
    settled(served)
    lines = transfers(served, before)
    assert [rank for rank, _, _ in lines] == [0, 1]
    assert sum(pages for _, pages, _ in lines) == 11  # ceil(700 / 64)
    # Two layers with latent and index K: a page by itself is four descriptors, pages that follow
    # each other at both ends share theirs. How many do depends on what earlier tests left free.
    assert all(4 <= descriptors <= 4 * pages for _, pages, descriptors in lines)


def test_decode_asks_only_for_the_pages_it_lacks(client: openai.OpenAI, served: Running) -> None:
    first = complete(client, prompt(640, "lacks "))
    settled(served)
    before = len(served.log_lines("CP shared KV transfer"))
    second = complete(client, prompt(640, "lacks "))
    settled(served)
    longer = complete(client, prompt(800, "lacks "))
    settled(served)
    sent = [pages for _, pages, _ in transfers(served, before)]
    assert sum(sent[:2]) == 0  # every rank concludes all the same
    assert sum(sent[2:]) == 13 - 10
    assert second.choices[0].text == first.choices[0].text
    assert longer.usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"prompt": ""}, 400),
        ({"prompt": 7}, 400),
        ({"model": "other"}, 404),
        ({"max_tokens": -1}, 400),
        ({"max_tokens": 10**12}, 400),
        ({"temperature": "hot"}, 400),
        ({"temperature": -0.7}, 400),
        ({"prompt": [1, 2, 10**9]}, 400),
    ],
)
def test_bad_input_is_refused_in_the_openai_shape(
    served: Running, change: dict[str, Any], status: int
) -> None:
    answer = served.post({"model": "demo", "prompt": "x", "max_tokens": 2} | change)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_huge_body_is_refused_and_the_next_request_served(
    client: openai.OpenAI, served: Running
) -> None:
    answer = served.post({"model": "demo", "prompt": "x" * 50_000_000})
    assert answer.status_code == 413
    assert complete(client, prompt(20), 2).usage.completion_tokens == 2


def test_health_and_models(client: openai.OpenAI, served: Running) -> None:
    assert served.get("/health").status_code == 200
    assert [model.id for model in client.models.list()] == ["demo"]
