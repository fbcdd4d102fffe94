"""The same requests for any pair of servers: random tokens in, bits to compare out."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx

from benchmarks.sglang.servers import Server

VOCABULARY = 4096
# SGLang's name for "no decode server": prefill answers with the first token and sends nothing.
NO_DECODE = "2.2.2.2"
TOGETHER = "four at once"
"""What the names of requests begin with that are asked at the same time."""
_rooms = count(1000)


@dataclass(frozen=True)
class Answer:
    """What came back: token ids, the log-probability of each, cached tokens; or why not."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    cached: int | None = None
    seconds: float = 0.0
    error: str = ""

    @property
    def unreachable(self) -> bool:
        """Whether the server has ended or hangs."""
        return "Timeout" in self.error or "ConnectError" in self.error


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens that no other seed shares a prefix with."""
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(length)]


def ask(
    prefill: Server,
    decode: Server | None,
    ids: list[int],
    tokens: int = 8,
    timeout: float = 45,
    name: str = "request",
) -> Answer:
    """One request through a prefill server, and a decode server if there is one."""
    room = next(_rooms)
    body: dict[str, Any] = {
        "rid": f"{name}/{room}",
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "bootstrap_room": room,
        "bootstrap_host": NO_DECODE if decode is None else "127.0.0.1",
    }
    if decode is not None:
        body["bootstrap_port"] = prefill.bootstrap_port
    begun = time.perf_counter()
    beside = ThreadPoolExecutor(1)
    try:
        if decode is not None:
            decoded = beside.submit(
                httpx.post, f"{decode.url}/generate", json=body, timeout=timeout
            )
        from_prefill = httpx.post(f"{prefill.url}/generate", json=body, timeout=timeout)
        answer = from_prefill
        # A request that prefill refuses would be waited for at decode.
        if decode is not None and _why_not(from_prefill) is None:
            answer = decoded.result()
    except httpx.HTTPError as error:
        return Answer(error=repr(error), seconds=time.perf_counter() - begun)
    finally:
        beside.shutdown(wait=False)
    seconds = time.perf_counter() - begun
    if why := _why_not(answer):
        return Answer(error=why, seconds=seconds)
    meta = answer.json()["meta_info"]
    chosen = meta.get("output_token_logprobs") or []
    return Answer(
        tuple(token for _, token, *_ in chosen),
        tuple(value for value, *_ in chosen),
        # Of the two servers, prefill knows what it had cached.
        from_prefill.json()["meta_info"].get("cached_tokens"),
        seconds,
    )


def _why_not(answer: httpx.Response) -> str | None:
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text[:300]}"
    reason = answer.json()["meta_info"].get("finish_reason") or {}
    return f"aborted: {reason.get('message', '')[:300]}" if reason.get("type") == "abort" else None


def ask_at_once(prefill: Server, decode: Server | None, prompts: list[list[int]]) -> list[Answer]:
    """All of them together, each on a connection of its own; answers in the order of prompts."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: ask(prefill, decode, ids, name=TOGETHER), prompts))
