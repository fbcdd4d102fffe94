"""A running cluster whose processes the tests of this folder kill, stop and resume."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cp_shared_kv.testing.running_cluster import Running, running, small_config

WATCHDOG_SECONDS = 4


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One cluster of one unit of each kind, with a quick watchdog."""
    log_file = tmp_path_factory.mktemp("struck") / "cluster.log"
    with running(small_config(watchdog_timeout=WATCHDOG_SECONDS), log_file) as cluster:
        yield cluster
