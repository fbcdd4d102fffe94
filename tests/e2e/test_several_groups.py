"""Two prefill groups and two decode workers behind one server: routing, and one of them lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cp_shared_kv.testing.running_cluster import Running, running, small_config

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log_file = tmp_path_factory.mktemp("several") / "cluster.log"
    config = small_config(prefill_groups=2, decode_workers=2, decode_max_total_tokens=4096)
    with running(config, log_file) as cluster:
        yield cluster


def body(text: str, max_tokens: int = 4) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def computed(served: Running) -> dict[int, int]:
    """Prompt tokens that each group has taken, by its index."""
    figures: dict[int, int] = {}
    for line in served.get("/metrics").text.splitlines():
        if line.startswith("cpkv:sent_pages_total"):
            labels, value = line.rsplit(" ", 1)
            group = int(labels.split('dp_rank="')[1][0])
            figures[group] = figures.get(group, 0) + int(float(value))
    return figures


def test_capacity_and_loads_count_every_group(several: Running) -> None:
    info = several.get("/server_info").json()
    assert info["max_total_num_tokens"] == 2 * 2 * 1024
    assert [(r["dp_rank"], r["cp_rank"]) for r in info["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    loads = several.get("/v1/loads").json()
    assert [load["dp_rank"] for load in loads["loads"]] == [0, 1]
    assert loads["dp_rank_count"] == 2


def test_prompts_without_a_common_prefix_spread_over_the_groups(several: Running) -> None:
    before = computed(several)
    for number in range(4):
        assert several.post(body(f"{number} apart " * 60)).status_code == 200
    after = computed(several)
    assert all(after[group] > before[group] for group in (0, 1))


def test_a_prompt_follows_its_prefix(several: Running) -> None:
    text = "the same long beginning, again and again; " * 20
    several.post(body(text))
    for turn in range(4):
        answer = several.post(body(text + f"turn {turn}")).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(text) // 64 * 64


def test_every_pair_gives_the_same_answer(several: Running) -> None:
    """Eight at once go to both groups and both decode workers; none differs from one alone."""
    texts = [f"question {number}: " + "what is owned by whom? " * 20 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = [r.json() for r in pool.map(lambda t: several.post(body(t, 8)), texts)]
    several.flush_cache()
    for text, answer in zip(texts, together, strict=True):
        alone = several.post(body(text, 8)).json()
        assert alone["choices"][0]["text"] == answer["choices"][0]["text"]


def test_one_group_lost_the_other_serves_meanwhile(several: Running) -> None:
    text = "a group is lost, " * 30
    expected = several.post(body(text)).json()["choices"][0]["text"]
    os.kill(several.cluster.pid("prefill-0/rank-1"), signal.SIGKILL)
    several.await_lost("prefill-0", life=1)
    for number in range(3):
        assert several.post(body(f"{number} meanwhile " * 30)).status_code == 200
        assert several.get("/health").status_code == 200
    assert several.post(body(text)).json()["choices"][0]["text"] == expected
    several.await_ready("prefill-0", life=2)
    assert several.post(body(text)).json()["choices"][0]["text"] == expected
    assert several.cluster.fatal is None
    metrics = several.get("/metrics").text
    assert 'cpkv:restarts_total{model_name="demo",unit="prefill-0"} 1.0' in metrics


def test_one_decode_worker_lost_the_other_serves_meanwhile(several: Running) -> None:
    text = "a decode worker is lost, " * 30
    expected = several.post(body(text)).json()["choices"][0]["text"]
    os.kill(several.cluster.pid("decode-1"), signal.SIGKILL)
    several.await_lost("decode-1", life=1)
    for number in range(3):
        assert several.post(body(f"{number} still here " * 30)).status_code == 200
    assert several.post(body(text)).json()["choices"][0]["text"] == expected
    several.await_ready("decode-1", life=2)
    assert several.post(body(text)).json()["choices"][0]["text"] == expected
