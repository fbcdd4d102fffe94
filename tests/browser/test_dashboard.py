"""The page at / in a real browser: its numbers are the server's, and it says when it has none.

With CPKV_SCREENSHOTS=1 the pictures in docs are taken anew; else nothing is written.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.testing.running_cluster import Running, running, small_config

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEXT = (ROOT / "LICENSE").read_text()
CP_SIZE = 4
PHYSICAL_TOKENS = 4096
API_KEY = "sk-of-the-dashboard"
PAGE_SIZE = 64
PAGES_A_RANK = PHYSICAL_TOKENS // PAGE_SIZE
PATIENCE_MS = 30_000

# The heat map as the page shows it: each owner's squares and the numbers beside them.
READ_MAP = """() => [...document.querySelectorAll(".pool")].map((pool) => ({
  unit: pool.dataset.unit,
  owners: [...pool.tBodies[0].rows].map((row) => ({
    name: row.cells[0].textContent,
    cells: [...row.querySelectorAll("b")].map((cell) => cell.dataset.counts.split(",").map(Number)),
    painted: [...row.querySelectorAll("b")].map((cell) => cell.style.background),
    label: row.querySelector("[role=img]").getAttribute("aria-label"),
    ...Object.fromEntries([...row.querySelectorAll("[data-state]")].map(
      (cell) => [cell.dataset.state, Number(cell.textContent.replaceAll(",", ""))])),
  })),
}))"""


@pytest.fixture(scope="module")
def served(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Four ranks that share 256 pages. Depends on the browser: without one nothing starts."""
    log_file = tmp_path_factory.mktemp("cluster") / "cluster.log"
    with running(_config(), log_file) as cluster:
        yield cluster


@pytest.fixture
def guarded(browser: Browser, tmp_path: Path) -> Iterator[Running]:
    """A server that asks for a key, of two ranks with every page on each; the test may stop it."""
    config = _config(
        attention_context_parallel_size=2,
        enable_nsa_prefill_cp_shared_kv=False,
        api_key=API_KEY,
    )
    with running(config, tmp_path / "cluster.log") as cluster:
        yield cluster


def _config(**changes: Any) -> EngineConfig:
    values = {
        "attention_context_parallel_size": CP_SIZE,
        "max_total_tokens": PHYSICAL_TOKENS,
        "decode_max_total_tokens": 20480,  # 320 pages: two a square
        "chunked_prefill_size": 1024,
    }
    return small_config(**(values | changes))


def state_of(cluster: Running) -> dict[str, Any]:
    return cluster.get("/dashboard/state").json()


def heat_map(page: Page) -> dict[str, list[dict[str, Any]]]:
    return {pool["unit"]: pool["owners"] for pool in page.evaluate(READ_MAP)}


def only(cell: tuple[int, int, int]) -> str | None:
    """The colour of a square whose pages are all in one state."""
    colours = ("var(--locked)", "var(--cached)", "var(--free)")
    return next((c for c, n in zip(colours, cell, strict=True) if n == sum(cell)), None)


def number(page: Page, name: str) -> int:
    return int(page.locator(f"#{name}").inner_text().replace(",", ""))


def opened(page: Page, cluster: Running) -> None:
    page.goto(cluster.url + "/")
    expect(page.locator("#status-text")).to_contain_text("live", timeout=PATIENCE_MS)


def ask(cluster: Running, prompt: str, max_tokens: int = 2) -> None:
    answer = cluster.post({"model": "demo", "prompt": prompt, "max_tokens": max_tokens})
    assert answer.status_code == 200, answer.text


def asked_once(cluster: Running) -> None:
    """A prompt larger than one rank's pool has been served, and nothing runs any more."""
    assert len(TEXT) > PHYSICAL_TOKENS
    ask(cluster, TEXT[:9000])
    cluster.until_nothing_is_held()


def test_after_a_prompt_larger_than_one_rank_every_owner_has_pages_of_it(
    served: Running, page: Page
) -> None:
    asked_once(served)
    opened(page, served)
    owners = heat_map(page)["prefill-0"]
    assert [owner["name"] for owner in owners] == [f"rank {rank}" for rank in range(CP_SIZE)]
    full_pages = 9000 // PAGE_SIZE
    assert sum(owner["cached"] for owner in owners) >= full_pages
    for owner in owners:
        assert owner["cached"] >= full_pages // CP_SIZE
        assert owner["locked"] == 0
        assert owner["cached"] + owner["free"] == PAGES_A_RANK
        assert f"{owner['cached']} cached, {owner['free']} free" in owner["label"]


def test_the_squares_are_those_of_the_state_and_add_up_to_the_pools(
    served: Running, page: Page
) -> None:
    asked_once(served)
    opened(page, served)
    told = {pool["unit"]: pool for pool in state_of(served)["pools"]}
    shown = heat_map(page)
    assert list(shown) == ["prefill-0", "decode-0"]
    for unit, owners in shown.items():
        assert len(owners) == len(told[unit]["owners"])
        for owner, counts in zip(owners, told[unit]["owners"], strict=True):
            cells = list(zip(counts["locked"], counts["cached"], counts["free"], strict=True))
            assert [tuple(cell) for cell in owner["cells"]] == cells
            assert sum(map(sum, cells)) == told[unit]["physical_pages"]
            for kind in ("locked", "cached", "free"):
                assert owner[kind] == sum(counts[kind])
            for cell, painted in zip(cells, owner["painted"], strict=True):
                assert painted == only(cell) or painted.startswith("linear-gradient("), cell
                assert (only(cell) is None) == painted.startswith("linear-gradient("), cell
    assert told["prefill-0"]["pages_per_bin"] == 1
    assert told["decode-0"]["pages_per_bin"] == 2


def test_the_figures_are_those_of_server_info(served: Running, page: Page) -> None:
    asked_once(served)
    opened(page, served)
    info = served.get("/server_info").json()
    usage, totals = info["usage"], info["totals"]
    assert number(page, "used-tokens") == usage["used_tokens"] == 0
    assert number(page, "cached-tokens") == usage["evictable_tokens"] > PHYSICAL_TOKENS
    assert number(page, "free-tokens") == usage["available_tokens"]
    assert number(page, "prompt-tokens") == totals["prompt_tokens"]
    assert number(page, "cached-prompt-tokens") == totals["cached_tokens"]
    assert number(page, "generated") == totals["generated_tokens"]
    assert page.locator("#recent-hit-rate").inner_text().endswith("%")
    assert page.locator("#hit-rate").inner_text() == f"{100 * usage['cache_hit_rate']:.1f}%"
    owners = heat_map(page)["prefill-0"]
    for kind, tokens in (("cached", "evictable_tokens"), ("free", "available_tokens")):
        assert sum(owner[kind] for owner in owners) * PAGE_SIZE == usage[tokens]
    rows = page.locator("#ranks tbody tr")
    for rank in info["ranks"]:
        cells = rows.nth(rank["cp_rank"]).locator("td").all_inner_texts()
        assert cells[0] == f"{rank['sent_pages']:,}"
        assert cells[2] == f"{rank['sent_descriptors']:,}"
        assert rank["read_bytes"] > 0
    expect(page.locator("#units tbody tr")).to_have_count(2)
    assert page.locator("#units tbody td.down").count() == 0


def test_a_flush_empties_the_map_without_a_reload(served: Running, page: Page) -> None:
    asked_once(served)
    opened(page, served)
    assert sum(owner["cached"] for owner in heat_map(page)["prefill-0"]) > 0
    httpx.post(f"{served.url}/flush_cache", trust_env=False).raise_for_status()
    expect(page.locator("#cached-tokens")).to_have_text("0", timeout=PATIENCE_MS)
    for owner in heat_map(page)["prefill-0"]:
        assert (owner["locked"], owner["cached"], owner["free"]) == (0, 0, PAGES_A_RANK)
        assert set(owner["painted"]) == {"var(--free)"}


def test_a_range_is_read_out_for_the_mouse_and_for_the_keyboard(
    served: Running, page: Page
) -> None:
    opened(page, served)
    rows = page.locator('[data-unit="prefill-0"] [role=img]')
    readout = page.locator("#readout")
    rows.nth(2).locator("b").nth(6).hover()
    expect(readout).to_contain_text("prefill-0, rank 2, physical page 7: ")
    rows.nth(1).focus()
    page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("prefill-0, rank 1, physical page 1: ")
    page.keyboard.press("End")
    expect(readout).to_contain_text(f"rank 1, physical page {PAGES_A_RANK}: ")
    page.keyboard.press("ArrowLeft")
    expect(readout).to_contain_text(f"rank 1, physical page {PAGES_A_RANK - 1}: ")


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window(served: Running, page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    opened(page, served)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_fetches_nothing_but_itself_and_its_figures(served: Running, page: Page) -> None:
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    opened(page, served)
    assert asked == {served.url + "/", served.url + "/dashboard/state"}


def test_an_engine_that_is_not_healthy_is_named_with_the_reason(
    served: Running, page: Page
) -> None:
    told = state_of(served)
    opened(page, served)
    told |= {"healthy": False, "reason": "prefill-0: page 7 has two owners", "usage": None}
    told["units"][0] |= {"up": False, "silent_seconds": None, "problems": ["<b>killed</b>"]}
    page.route("**/dashboard/state", lambda route: route.fulfill(json=told))
    expect(page.locator("#banner")).to_have_text(
        "The engine is not healthy: prefill-0: page 7 has two owners", timeout=PATIENCE_MS
    )
    first = page.locator("#units tbody tr").first
    expect(first.locator("td.down")).to_have_text("down")
    expect(first).to_contain_text("<b>killed</b>")  # as text, not as markup
    page.unroute("**/dashboard/state")
    expect(page.locator("#status-text")).to_contain_text("live", timeout=PATIENCE_MS)
    expect(page.locator("#banner")).to_be_hidden()


def test_a_proxy_without_a_server_behind_it_is_no_figure(served: Running, page: Page) -> None:
    opened(page, served)
    page.route("**/dashboard/state", lambda route: route.fulfill(status=502, body="no"))
    banner = page.locator("#banner")
    expect(banner).to_contain_text("The server answered with status 502.", timeout=PATIENCE_MS)


def test_it_asks_for_the_key_says_when_it_is_wrong_and_when_the_server_is_gone(
    guarded: Running, page: Page
) -> None:
    page.goto(guarded.url + "/")
    banner, key = page.locator("#banner"), page.locator("#key")
    expect(banner).to_have_text("This server asks for its API key.", timeout=PATIENCE_MS)
    expect(page.locator("#figures")).to_be_hidden()
    key.fill("sk-of-another-server")
    key.press("Enter")
    expect(banner).to_have_text("The server refused this API key.", timeout=PATIENCE_MS)
    expect(page.locator("#figures")).to_be_hidden()
    key.fill(API_KEY)
    key.press("Enter")
    expect(page.locator("#status-text")).to_contain_text("live", timeout=PATIENCE_MS)
    expect(page.locator("#key-form")).to_be_hidden()
    (owner,) = heat_map(page)["prefill-0"]
    assert (owner["name"], owner["free"]) == ("each rank", PAGES_A_RANK)
    assert API_KEY not in page.content()
    assert page.evaluate("localStorage.length") == 0
    page.reload()  # the tab still has it
    expect(page.locator("#status-text")).to_contain_text("live", timeout=PATIENCE_MS)

    os.kill(guarded.cluster.pid("decode-0"), signal.SIGKILL)
    decode = page.locator("#units tbody tr").nth(1)
    expect(decode).to_contain_text("decode-0up2", timeout=PATIENCE_MS)  # its second life

    guarded.cluster.stop()
    expect(banner).to_contain_text("The server does not answer.", timeout=PATIENCE_MS)
    expect(banner).to_contain_text("The figures below are those of ")
    expect(page.locator("#status-text")).to_have_text("not connected")


@pytest.mark.skipif(
    os.environ.get("CPKV_SCREENSHOTS") != "1", reason="CPKV_SCREENSHOTS=1 takes docs/dashboard*.png"
)
def test_pictures_for_the_documents(served: Running, page: Page) -> None:
    httpx.post(f"{served.url}/flush_cache", trust_env=False).raise_for_status()
    opened(page, served)
    for start, length in ((0, 2500), (700, 2000), (0, 3500), (0, 4500), (4000, 1500)):
        ask(served, TEXT[start : start + length], max_tokens=40)
        # The page is to have seen it before the next, for its curves.
        text = page.locator("#status-text").inner_text()
        expect(page.locator("#status-text")).not_to_have_text(text, timeout=PATIENCE_MS)
    # More than the pool holds at once, so that some wait: over many of the page's questions.
    prompts = [TEXT[:5500], *(f"{number} {TEXT[:6500]}" for number in range(5))]
    asking = [threading.Thread(target=ask, args=(served, prompt, 60)) for prompt in prompts]
    for thread in asking:
        thread.start()
    expect(page.locator("#used-tokens")).not_to_have_text("0", timeout=PATIENCE_MS)
    for scheme, name in (("light", "dashboard.png"), ("dark", "dashboard-dark.png")):
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=DOCS / name, full_page=True)
        assert (DOCS / name).stat().st_size < 200_000
    for thread in asking:
        thread.join()
