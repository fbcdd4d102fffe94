"""What a kill costs: seconds until the next right answer, and requests that fail, by process.

A cluster of one unit of each kind under load by six clients. SIGKILL at a random moment; a probe
is asked again and again until its answer is that of a cold run alone. "failed" and "cut" in the
result's config are the clients' requests that ended with a reason, and those whose connection
broke with the server. The demo model: larger models take longer to load their weights again.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks import Benchmark, Measurement, Progress
from cp_shared_kv.testing.client_load import CLIENTS, body, under_load
from cp_shared_kv.testing.running_cluster import Running, running, small_config

ROUNDS = 7
PROCESSES = ("prefill-0/rank-1", "prefill-0", "decode-0", "server-0")
PROBE = "the probe: what does a cold run alone answer? " * 12


def run(progress: Progress) -> Measurement:
    """Kill each kind of process so many times."""
    samples: dict[str, list[float]] = {name: [] for name in PROCESSES}
    told: dict[str, Any] = {name: {"failed": [], "cut": []} for name in PROCESSES}
    with (
        tempfile.TemporaryDirectory() as directory,
        running(small_config(), Path(directory) / "log") as served,
    ):
        expected = _ask(served)
        for number in range(ROUNDS):
            for place, name in enumerate(PROCESSES):
                progress(name, number * len(PROCESSES) + place, ROUNDS * len(PROCESSES))
                with under_load(served, seed=number) as load:
                    time.sleep(0.3 + random.Random(f"{number} {name}").random())
                    life = served.cluster.life(name.partition("/")[0]).number
                    begun = time.perf_counter()
                    os.kill(served.cluster.pid(name), signal.SIGKILL)
                    served.await_lost(name.partition("/")[0], life)
                    while _ask(served) != expected:
                        time.sleep(0.01)
                    samples[name].append(time.perf_counter() - begun)
                told[name]["failed"].append(len(load.failed))
                told[name]["cut"].append(load.cut)
    progress("done", ROUNDS * len(PROCESSES), ROUNDS * len(PROCESSES))
    return Measurement({"rounds": ROUNDS, "clients": CLIENTS, "requests": told}, samples)


def _ask(served: Running) -> str | None:
    try:
        answer = served.post(body(PROBE, 8))
    except httpx.TransportError:
        return None
    return answer.json()["choices"][0]["text"] if answer.status_code == 200 else None


BENCHMARK = Benchmark("kills", "what a killed process costs until the next right answer", run)
