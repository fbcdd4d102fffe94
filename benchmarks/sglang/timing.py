"""Time to the first token and tokens per second: stock, shared by pull, shared by collective."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.sglang.requests import Answer, ask, ask_at_once, prompt
from benchmarks.sglang.servers import Server, await_all
from benchmarks.sglang.variants import CHUNK, Farm, Variant

ROUNDS = 7
PREFIXES = (0, 8192, 32768, 131072)
NEW = (512, CHUNK)
AT_ONCE = 16
TOKENS = 160_000
"""Of the replicated server; the shared ones have the part of a rank."""


def time_servers(
    variant: Variant, model_path: str, gpus: int, logs: Path, path: list[Path], seconds: float
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Samples by case and server, in seconds; and what else was seen."""
    farm = Farm(model_path, gpus, context_tokens=PREFIXES[-1] + 2 * CHUNK, compared=False)
    each = -(-TOKENS // gpus)
    servers = [
        farm.prefill("timed-stock", variant, TOKENS, shared=False),
        farm.prefill("timed-pull", variant, each, shared=True, read="pull"),
        farm.prefill("timed-collective", variant, each, shared=True, read="collective"),
    ]
    samples: dict[str, list[float]] = {}
    figures: dict[str, Any] = {}
    try:
        for server in servers:
            server.start(logs, path)
        if failed := await_all(servers, seconds):
            return {}, {"not started": failed}
        for prefix_tokens in PREFIXES:
            cached = prompt(prefix_tokens, prefix_tokens)
            for server in servers:
                if cached:
                    _checked(ask(server, None, [*cached, 5], tokens=1))
            for new in NEW:
                for number in range(-1, ROUNDS):  # the first warms up
                    ids = cached + prompt(1000 + number + 100 * new + prefix_tokens, new)
                    for server in servers:
                        answer = _checked(ask(server, None, ids, tokens=1))
                        case = f"{server.name}: {prefix_tokens} cached, {new} new"
                        if number >= 0:
                            samples.setdefault(case, []).append(answer.seconds)
                        figures[f"cached, {case}"] = answer.cached
        for number in range(-1, 5):
            prompts = [prompt(50_000 + 100 * number + i, CHUNK) for i in range(AT_ONCE)]
            for server in servers:
                seconds_all = _all_at_once(server, prompts)
                if number >= 0:
                    case = f"{server.name}: {AT_ONCE} x {CHUNK} at once"
                    samples.setdefault(case, []).append(seconds_all)
        figures["startup"] = {s.name: s.lines("CP shared KV|KV Cache is alloc") for s in servers}
        return samples, figures
    finally:
        for server in servers:
            server.stop()


def _all_at_once(server: Server, prompts: list[list[int]]) -> float:
    begun = time.perf_counter()
    for answer in ask_at_once(server, None, prompts):
        _checked(answer)
    return time.perf_counter() - begun


def _checked(answer: Answer) -> Answer:
    if answer.error:
        raise RuntimeError(answer.error)
    return answer
