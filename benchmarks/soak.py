"""Mixed load with aborts for half an hour: do memory and page counts stay where they are?

Eight clients ask short and long questions, streamed and whole, with shared beginnings; a part of
them goes away in mid-answer, and some run into their own `timeout`. Every few seconds the memory of
each process is read, the books of each process are checked, and available + evictable + used tokens
are compared with the capacity. The curves are in the result's config; `CPKV_SOAK_MINUTES` sets
another length. Counts and no times. docs/generate_soak.py draws them.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx

from benchmarks import Benchmark, Measurement, Progress
from cp_shared_kv.testing.client_load import body
from cp_shared_kv.testing.running_cluster import Running, running, small_config

MINUTES = 30.0
CLIENTS = 8
SAMPLE_SECONDS = 5.0
WORDS = 2000
PROCESSES = ("prefill-0", "prefill-0/rank-0", "prefill-0/rank-1", "decode-0", "server-0")


class _Clients:
    """Ask until told to stop; what became of it."""

    def __init__(self, served: Running) -> None:
        self._served = served
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.counts = {"answered": 0, "left": 0, "timed_out": 0, "failed": 0}
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._work, args=(number,), daemon=True)
            for number in range(CLIENTS)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
            if thread.is_alive():
                raise AssertionError("a client was never answered")

    def _work(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self._served.url, trust_env=False, timeout=60) as client:
            while not self._stop.is_set():
                outcome = self._ask(client, chance)
                with self._lock:
                    self.counts[outcome] += 1

    def _ask(self, client: httpx.Client, chance: random.Random) -> str:
        shared = "a beginning that many share, " * chance.choice([0, 4, 12, 24])
        # Of so many different words only: the tokenizer keeps up to 10,000 that it has seen, which
        # would look like a leak for as long as new ones come.
        question = body(f"{shared}{chance.randrange(WORDS)} " + "and " * chance.randrange(120), 1)
        question["max_tokens"] = chance.choice([1, 8, 40, 120])
        leaves = chance.random() < 0.2
        if chance.random() < 0.1:
            question["timeout"] = 0.05
        if not leaves and chance.random() < 0.5:
            answer = client.post("/v1/completions", json=question)
            return self._judge(answer.status_code, answer.text)
        with client.stream("POST", "/v1/completions", json=question | {"stream": True}) as stream:
            if stream.status_code != 200:
                return self._judge(stream.status_code, stream.read().decode())
            last = ""
            for count, line in enumerate(stream.iter_lines()):
                last = line or last
                if leaves and count > chance.randrange(20):
                    return "left"
        return "answered" if last == "data: [DONE]" else self._judge(0, last)

    def _judge(self, status: int, text: str) -> str:
        if status == 200:
            return "answered"
        if status == 504 or '"timeout"' in text:
            return "timed_out"
        with self._lock:
            self.failures.append(f"{status} {text[:300]}")
        return "failed"


def run(progress: Progress) -> Measurement:
    """Load a cluster and watch it."""
    minutes = float(os.environ.get("CPKV_SOAK_MINUTES", MINUTES))
    curves: dict[str, list[float]] = {"minutes": [], "used_tokens": [], "evictable_tokens": []}
    rss: dict[str, list[float]] = {name: [] for name in PROCESSES}
    broken: list[str] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        running(small_config(), Path(directory) / "log") as served,
    ):
        capacity = served.get("/server_info").json()["max_total_num_tokens"]
        begun = time.monotonic()
        with _Clients(served) as clients:
            while (passed := (time.monotonic() - begun) / 60) < minutes:
                progress("under load", int(passed * 60), int(minutes * 60))
                usage = _usage(served)
                curves["minutes"].append(round(passed, 3))
                curves["used_tokens"].append(usage["used_tokens"])
                curves["evictable_tokens"].append(usage["evictable_tokens"])
                for name in PROCESSES:
                    rss[name].append(_resident_mib(served.cluster.pid(name)))
                whole = sum(
                    usage[part] for part in ("used_tokens", "evictable_tokens", "available_tokens")
                )
                if whole != capacity:
                    broken.append(f"{passed:.2f} min: {whole} tokens of {capacity}")
                books = served.get("/debug/invariants")
                if books.status_code != 200:
                    broken.append(f"{passed:.2f} min: {books.text[:300]}")
                time.sleep(SAMPLE_SECONDS)
        for _ in range(100):
            rest = _usage(served)
            if rest["used_tokens"] == rest["decode_used_tokens"] == 0:
                break
            time.sleep(0.1)
    progress("done", int(minutes * 60), int(minutes * 60))
    soak: dict[str, Any] = {
        **curves,
        "resident_mib": rss,
        "requests": clients.counts,
        "failures": clients.failures[:20],
        "broken_books": broken[:20],
        "used_tokens_at_rest": rest["used_tokens"],
        "decode_used_tokens_at_rest": rest["decode_used_tokens"],
    }
    config: dict[str, object] = {"minutes": minutes, "clients": CLIENTS, "soak": soak}
    return Measurement(config, {})


def _usage(served: Running) -> dict[str, Any]:
    return served.get("/server_info").json()["usage"]


def _resident_mib(pid: int) -> float:
    """Resident memory of a process without what it shares with others."""
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return 0.0


BENCHMARK = Benchmark("soak", "half an hour of mixed load: memory and pages", run)
