"""The page at / and its figures, without a browser: what is sent, and what may be run of it."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from cp_shared_kv.engine.api import PoolPages, UnitState
from cp_shared_kv.server.dashboard_state import DashboardState, dashboard_state, most_bins
from cp_shared_kv.server.settings import ServerSettings

KEY = "sk-0123456789"


def state(http) -> dict:
    response = http.get("/dashboard/state")
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    msgspec.json.decode(response.content, type=DashboardState)
    return response.json()


def test_the_figures_are_those_of_server_info(http, description):
    info, told = http.get("/server_info").json(), state(http)
    known = {
        **info["capacity"],
        "page_size": info["page_size"],
        "total_logical_tokens": info["max_total_num_tokens"],
        "router_policy": description.router_policy,
    }
    assert told["capacity"] == {name: known[name] for name in told["capacity"]}
    for name in set(told["usage"]) & set(info["usage"]):
        assert told["usage"][name] == info["usage"][name]
    for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "evicted_tokens"):
        assert told["usage"][f"{name}_total"] == info["totals"][name]
    for rank, same in zip(told["ranks"], info["ranks"], strict=True):
        assert rank["cp_rank"] == same["cp_rank"]
        for name in ("sent_pages", "sent_descriptors", "sent_bytes", "read_bytes"):
            assert rank[f"{name}_total"] == same[name]


def test_pools_add_up_to_the_use(http):
    told = state(http)
    group, worker = told["pools"]
    assert (group["unit"], worker["unit"]) == ("prefill-0", "decode-0")
    sums = {
        kind: sum(sum(owner[kind]) for owner in group["owners"]) * told["capacity"]["page_size"]
        for kind in ("free", "cached", "locked")
    }
    usage = told["usage"]
    assert sums == {
        "free": usage["available_tokens"],
        "cached": usage["evictable_tokens"],
        "locked": usage["used_tokens"],
    }
    assert group["epoch"] == str(2**60 + 1)  # as digits: JavaScript would round the number


def test_the_hit_rate_of_the_last_minute_is_null_where_nobody_asked(http, engine):
    assert state(http)["usage"]["recent_cache_hit_rate"] is None
    engine.current_stats = replace(
        engine.current_stats, recent_prompt_tokens=400, recent_cached_tokens=100
    )
    assert state(http)["usage"]["recent_cache_hit_rate"] == 0.25


def test_units_say_what_is_wrong(http):
    up, down = state(http)["units"]
    assert (up["unit"], up["life"], up["up"], up["silent_seconds"]) == ("prefill-0", 1, True, 0.5)
    assert (down["unit"], down["life"], down["up"]) == ("decode-0", 2, False)
    assert down["problems"] == ["it was killed"]


def test_it_outlives_the_engine_and_says_so(http, engine):
    engine.current_stats = None
    told = state(http)
    assert (told["healthy"], told["reason"]) == (False, "the engine does not answer")
    assert (told["usage"], told["ranks"], told["pools"]) == (None, [], [])
    assert told["capacity"]["total_logical_tokens"] == 512
    engine.health = (False, "prefill-0: page 7 has two owners")
    assert state(http)["reason"] == "prefill-0: page 7 has two owners"


def test_no_prompt_no_output_and_no_key_is_in_it(own_server):
    server, _ = own_server(settings=ServerSettings(api_key=KEY))
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": "fake-model", "prompt": "a secret prompt", "max_tokens": 4}
    asked = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert asked.status_code == 200
    told = httpx.get(f"{server.url}/dashboard/state", headers=headers)
    assert told.status_code == 200
    for text in ("secret", "the answer", KEY):
        assert text not in told.text
    assert httpx.get(f"{server.url}/dashboard/state").status_code == 401
    page = httpx.get(f"{server.url}/")
    assert page.status_code == 200
    assert KEY not in page.text


@pytest.mark.parametrize(("groups", "cp_size", "workers"), [(1, 4, 1), (8, 8, 16), (1, 64, 64)])
def test_an_answer_on_a_large_pool_stays_below_64_kib(description, groups, cp_size, workers):
    described = replace(description, prefill_groups=groups, cp_size=cp_size, decode_workers=workers)
    bins = most_bins(described)
    pages_per_bin = 99_999
    row = [33_333] * bins
    pools = [
        PoolPages(
            unit=f"{role}-{index}",
            role=role,
            index=index,
            epoch=2**60,
            physical_pages=pages_per_bin * bins,
            pages_per_bin=pages_per_bin,
            free=[row] * owners,
            cached=[row] * owners,
            locked=[row] * owners,
        )
        for role, count, owners in (("prefill", groups, cp_size), ("decode", workers, 1))
        for index in range(count)
    ]
    units = [
        UnitState(unit=p.unit, life=1, up=True, silent_seconds=0.1, problems=[]) for p in pools
    ]
    told = msgspec.json.encode(dashboard_state(described, (True, "ok"), None, units, pools))
    assert len(told) < 2**16


def test_ranges_are_asked_for_as_the_page_can_show_them(http, engine):
    state(http)
    assert engine.most_bins == 256


def test_the_page_may_run_its_own_script_and_style_and_nothing_else(http):
    response = http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    policy = dict(
        part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.S)
        assert len(text) > 1000
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_the_page_names_no_other_host_and_no_file(http):
    text = http.get("/").text
    assert re.findall(r"https?://", text) == []
    assert re.findall(r'\bsrc=|@import|url\(|style="|\son\w+="', text) == []
    assert set(re.findall(r'href="([^"]*)"', text)) == {"data:,", "docs", "metrics"}


def test_a_wheel_brings_the_page_with_it(tmp_path: Path):
    from hatchling.builders.wheel import WheelBuilder

    root = Path(__file__).parents[3]
    (wheel,) = WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = (root / "src/cp_shared_kv/server/dashboard_page").iterdir()
    assert {f"cp_shared_kv/server/dashboard_page/{source.name}" for source in sources} <= names
