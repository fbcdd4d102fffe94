"""--verify-kv-transfer: bytes of a decode worker's pool are damaged while pages arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cp_shared_kv.memory.buffers import SharedMemoryBuffer
from cp_shared_kv.memory.segment_names import SHARED_MEMORY_DIRECTORY
from cp_shared_kv.testing.client_load import body, under_load
from cp_shared_kv.testing.running_cluster import Running, running, small_config

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log_file = tmp_path_factory.mktemp("verified") / "cluster.log"
    config = small_config(verify_kv_transfer=True, disable_radix_cache=True)
    with running(config, log_file) as cluster:
        yield cluster


@contextmanager
def damage(served: Running) -> Iterator[None]:
    """Flip a byte in every page of decode's pool again and again."""
    run = served.cluster.spec.run_id
    (path,) = Path(SHARED_MEMORY_DIRECTORY).glob(f"cpkv-{run}-decode-0.1-pool-*")
    memory = SharedMemoryBuffer.attach(path.name, path.stat().st_size)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            memory.tensor[::97] ^= 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        memory.close()


def test_a_clean_run_never_trips(verified: Running) -> None:
    with under_load(verified, seed=4) as load:
        while load.answered < 30 and not load.failed:
            pass
    assert load.failed == []


def test_a_damaged_page_fails_its_request_with_the_pages_name_and_the_next_is_answered(
    verified: Running,
) -> None:
    question = body("which page is damaged? " * 40, 8)
    expected = verified.post(question).json()["choices"][0]["text"]
    with damage(verified):
        failed = verified.post(question)
    assert failed.status_code == 500
    assert "KV page damaged on its way from CP rank" in failed.text
    assert "physical page" in failed.text
    assert verified.post(question).json()["choices"][0]["text"] == expected
    assert verified.usage()["decode_used_tokens"] == 0
    assert any("KV page damaged" in line for line in verified.log_lines("room"))
    assert verified.get("/debug/invariants").json()["balanced"]
