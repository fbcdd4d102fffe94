"""Running clusters for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cp_shared_kv.testing.running_cluster import Running, running, small_config


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One shared-KV cluster for all tests that do not change it."""
    log_file = tmp_path_factory.mktemp("cluster") / "cluster.log"
    with running(small_config(), log_file) as cluster:
        yield cluster
