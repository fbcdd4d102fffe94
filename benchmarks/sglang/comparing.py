"""Stock beside shared: the same requests in the same order, and every bit that came back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import httpx

from benchmarks.sglang.drafts import compared as drafts_compared
from benchmarks.sglang.requests import TOGETHER, Answer, ask, ask_at_once, prompt
from benchmarks.sglang.servers import Server, await_all
from benchmarks.sglang.variants import Farm, Variant

STOCK_TOKENS = 65536
SHARED_TOKENS = 16384
"""Of one rank: a prompt of 20,000 fits two ranks' pools and not one."""
OVER_ONE_RANK = 20_000


def compare(
    variants: list[Variant],
    model_path: str,
    gpus: int,
    logs: Path,
    path: list[Path],
    seconds: float,
    one_gpu: bool,
) -> dict[str, Any]:
    """All pairs at once, decode beside them; by variant what was seen.

    They have one KV type, and all speculate or none.
    """
    drafts, kv_dtype = variants[0].drafts, variants[0].kv_dtype
    farm = Farm(model_path, gpus, 32768, compared=True, drafts=drafts, one_gpu=one_gpu)
    decodes = {
        shared: farm.decode(f"decode-{shared}-{kv_dtype}", kv_dtype, 131072, shared == "shared")
        for shared in ("stock", "shared")
    }
    small = farm.prefill(f"small-{kv_dtype}", variants[0], SHARED_TOKENS, shared=False)
    pairs: list[tuple[Variant, Server, Server]] = []
    for number, variant in enumerate(variants):
        name = f"{kv_dtype}-{number}"
        pairs.append(
            (
                variant,
                farm.prefill(f"stock-{name}", variant, STOCK_TOKENS, shared=False),
                farm.prefill(f"shared-{name}", variant, SHARED_TOKENS, shared=True),
            )
        )
    servers = [*decodes.values(), small, *(server for _, *two in pairs for server in two)]
    try:
        for server in servers:
            server.start(logs, path)
        failed = await_all(servers, seconds)
        found: dict[str, Any] = {}
        if ended := {d.name: failed[d.name] for d in decodes.values() if d.name in failed}:
            return {"decode": ended}
        for variant, stock, shared in pairs:
            why = {name: failed[name] for name in (stock.name, shared.name) if name in failed}
            if why:
                found[variant.name] = {"not started": why}
                continue
            found[variant.name] = _pair(stock, shared, decodes)
            if drafts:
                found[variant.name]["drafts in prefill"] = drafts_compared(stock, shared)
        if drafts:
            found["drafts in decode"] = drafts_compared(decodes["stock"], decodes["shared"])
        if small.name not in failed:
            ask(small, None, prompt(9, OVER_ONE_RANK), timeout=30)
            found[f"stock with {SHARED_TOKENS} tokens"] = small.lines("exceeds the maximum allowed")
        return found
    finally:
        for server in servers:
            server.stop()


def _pair(stock: Server, shared: Server, decodes: dict[str, Server]) -> dict[str, Any]:
    theirs = _requests(stock, decodes["stock"])
    ours = _requests(shared, decodes["shared"])
    ended = {name for name in ours | theirs if name not in ours or name not in theirs}
    for name in ended:
        ours.setdefault(name, Answer(error="not asked"))
        theirs.setdefault(name, Answer(error="not asked"))
    return {
        "requests": {
            name: {
                "same tokens": ours[name].ids == theirs[name].ids and bool(ours[name].ids),
                "same bits": ours[name].logprobs == theirs[name].logprobs
                and bool(ours[name].logprobs),
                "same first bits": ours[name].logprobs[:1] == theirs[name].logprobs[:1]
                and bool(ours[name].logprobs),
                "first logprob": [a[name].logprobs[:1] for a in (theirs, ours)],
                "cached": [a[name].cached for a in (theirs, ours)],
                "error": [a[name].error for a in (theirs, ours)],
                "seconds": [round(a[name].seconds, 3) for a in (theirs, ours)],
            }
            for name in ours
        },
        "stock repeats itself": _repeats(theirs, "6144", "6144, flushed"),
        "shared repeats itself": _repeats(ours, "6144", "6144, flushed"),
        "shared after eviction as before": _repeats(ours, "3001", "3001, after eviction"),
        "startup": shared.lines("CP shared KV|KV Cache is allocated"),
        "stock startup": stock.lines("KV Cache is allocated"),
        "sent": _sent(shared),
        "stock sent": _sent(stock),
        "log": shared.errors(12),
    }


def _repeats(answers: dict[str, Answer], *names: str) -> bool:
    first, again = (answers.get(name, Answer()) for name in names)
    return bool(first.logprobs) and first.logprobs == again.logprobs


def _requests(prefill: Server, decode: Server) -> dict[str, Answer]:
    long = prompt(9, OVER_ONE_RANK)
    answers: dict[str, Answer] = {}
    for name, ids in {
        "70": prompt(1, 70),
        "1000": prompt(2, 1000),
        "3001": prompt(3, 3001),
        "6144": prompt(4, 6144),
        "6144 cached + 500": prompt(4, 6144) + prompt(5, 500),
        "3001 cached + 1": [*prompt(3, 3001), 77],
        "20000, more than a rank holds": long,
        "20000 cached + 300": long + prompt(6, 300),
        # 36,000 more tokens, so that what was cached has to go
        **{f"12000 ({seed})": prompt(seed, 12_000) for seed in (21, 22, 23)},
        "3001, after eviction": prompt(3, 3001),
    }.items():
        # The first one waits for kernels that are compiled when they are first used.
        answers[name] = ask(prefill, decode, ids, timeout=45 if answers else 120, name=name)
        if answers[name].unreachable:  # what follows would only wait
            return answers
    together = [prompt(seed, 1500 + 300 * seed) for seed in range(31, 35)]
    for number, answer in enumerate(ask_at_once(prefill, decode, together)):
        answers[f"{TOGETHER} ({number})"] = answer
    with contextlib.suppress(httpx.HTTPError):  # what follows then says why
        httpx.post(f"{prefill.url}/flush_cache", timeout=10)
    answers["6144, flushed"] = ask(prefill, decode, prompt(4, 6144), name="6144, flushed")
    return answers


def _sent(server: Server) -> dict[str, int]:
    """Pages that each rank has sent, by its log."""
    sent: dict[str, int] = {}
    for line in server.lines("sent pages="):
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        rank = f"rank {words['cp_rank']}"
        sent[rank] = sent.get(rank, 0) + int(words["pages"])
    return sent
