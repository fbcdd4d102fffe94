"""Clients that ask a running cluster one question after the other, for fault tests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from cp_shared_kv.testing.running_cluster import Running

CLIENTS = 6
ANSWER_SECONDS = 90


def body(text: str, max_tokens: int) -> dict[str, Any]:
    """A greedy completion of exactly so many tokens."""
    return {
        "model": "demo",
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


@dataclass
class Load:
    """Clients that ask one question after the other; what they got."""

    answered: int = 0
    failed: list[str] = field(default_factory=list[str])
    cut: int = 0
    """Connections that broke: the server itself was lost."""


@contextmanager
def under_load(served: Running, seed: int) -> Generator[Load]:
    """Run clients in the background; leaving waits for the answers under way."""
    load, stop, lock = Load(), threading.Event(), threading.Lock()

    def work(number: int) -> None:
        chance = random.Random(f"{seed} {number}")  # noqa: S311  (repeatable on purpose)
        while not stop.is_set():
            shared = "a beginning that many share, " * chance.choice([0, 6, 14])
            text = f"{shared}client {number} asks {chance.random()} " + "and more " * 20
            try:
                answer = served.post(body(text, chance.choice([1, 8, 40])))
            except httpx.TransportError:
                with lock:
                    load.cut += 1
                time.sleep(0.05)
                continue
            with lock:
                if answer.status_code == 200:
                    load.answered += 1
                else:
                    load.failed.append(f"{answer.status_code} {answer.text}")

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join(ANSWER_SECONDS)
            if thread.is_alive():
                raise AssertionError("a client was never answered")
