"""A small cluster on the demo model, for tests: started, asked over HTTP, stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cp_shared_kv.demo_model.cache import demo_checkpoint_directory
from cp_shared_kv.engine.cluster import Cluster
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.server.serve import open_listener

PHYSICAL_TOKENS = 1024
CP_SIZE = 2
WAIT_SECONDS = 60
NOTHING_HELD = {
    "used_tokens": 0,
    "decode_used_tokens": 0,
    "queued_requests": 0,
    "prefill_requests": 0,
    "decode_queued_requests": 0,
    "decode_requests": 0,
}
CHUNK = 300  # not a multiple of the page size, so chunks end inside pages


def small_config(**changes: Any) -> EngineConfig:
    """Two ranks that share a pool of 2,048 tokens."""
    values: dict[str, Any] = {
        "model_path": demo_checkpoint_directory(),
        "served_model_name": "demo",
        "port": 0,
        "attention_context_parallel_size": CP_SIZE,
        "enable_nsa_prefill_context_parallel": True,
        "enable_nsa_prefill_cp_shared_kv": True,
        "max_total_tokens": PHYSICAL_TOKENS,
        "decode_max_total_tokens": 6144,
        "chunked_prefill_size": CHUNK,
        "enable_metrics": True,
    }
    return EngineConfig(**(values | changes))


@dataclass
class Running:
    """A cluster, where it listens, and what it has logged."""

    cluster: Cluster
    url: str
    log_file: Path

    def get(self, path: str) -> httpx.Response:
        """GET a path of the server."""
        return httpx.get(self.url + path, trust_env=False, timeout=20)

    def post(self, body: Any) -> httpx.Response:
        """POST a body to /v1/completions."""
        return httpx.post(f"{self.url}/v1/completions", json=body, trust_env=False, timeout=60)

    def flush_cache(self) -> dict[str, int]:
        """Drop the cached prefixes that no request uses; what was dropped, in pages and tokens."""
        flushed = httpx.post(f"{self.url}/flush_cache", trust_env=False, timeout=20)
        return flushed.raise_for_status().json()

    def usage(self) -> dict[str, Any]:
        """Use of the pools now, in tokens."""
        return self.get("/server_info").json()["usage"]

    def until(self, **figures: int) -> dict[str, Any]:
        """Wait until the use of the pools and queues has these figures; returns all of it."""
        usage: dict[str, Any] = {}

        def has_come() -> bool:
            usage.update(self.usage())
            return figures.items() <= usage.items()

        self._await(has_come, f"{figures}")
        return usage

    def until_nothing_is_held(self) -> None:
        """Wait until no request holds or waits for anything; then every page is in the books of
        every process."""
        usage = self.until(**NOTHING_HELD)
        info = self.get("/server_info").json()
        assert usage["available_tokens"] + usage["evictable_tokens"] == info["max_total_num_tokens"]
        books = self.get("/debug/invariants")
        assert books.status_code == 200, books.text

    def await_lost(self, unit: str, life: int) -> None:
        """Wait until the supervisor has noticed that this life of a unit is over."""
        self._await(lambda: not self._has_life(unit, lambda number: number <= life), f"{unit} lost")

    def await_ready(self, unit: str, life: int) -> None:
        """Wait until a unit is up and ready in this life."""
        self._await(
            lambda: (
                self._has_life(unit, lambda number: number == life) and self.cluster.is_ready(unit)
            ),
            f"{unit} ready in life {life}",
        )

    def _has_life(self, unit: str, fits: Callable[[int], bool]) -> bool:
        try:
            return fits(self.cluster.life(unit).number)
        except KeyError:
            return False

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not in {WAIT_SECONDS} s; {self.cluster.fatal}")
            time.sleep(0.02)

    def log_lines(self, start: str) -> list[str]:
        """Logged messages that begin with `start`, without time and process."""
        lines = [line.partition("] ")[2] for line in self.log_file.read_text().splitlines()]
        return [line for line in lines if line.startswith(start)]


@contextmanager
def running(config: EngineConfig, log_file: Path) -> Generator[Running]:
    """Start a cluster with a server; on failure its log is part of the error."""
    listener = open_listener(config.host, config.port)
    host, port = listener.getsockname()[:2]
    try:
        with Cluster(config, listener=listener, log_file=log_file) as cluster:
            listener.close()
            yield Running(cluster, f"http://{host}:{port}", log_file)
    except Exception as error:
        error.add_note(log_file.read_text()[-4000:] if log_file.exists() else "no log")
        raise
