"""Shared memory: pools that do not fit it are refused before a process starts, with what to do."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from cp_shared_kv.engine import sizing
from cp_shared_kv.engine.sizing import check_shared_memory
from cp_shared_kv.errors import CapacityError

from .sized_groups import MIB, config, limits_of, pool_spec


def give_shared_memory(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    stat = SimpleNamespace(f_bavail=free // 4096, f_blocks=total // 4096, f_frsize=4096)
    asked: list[object] = []

    def statvfs(path: object) -> SimpleNamespace:
        asked.append(path)
        assert path == "/dev/shm"
        return stat

    monkeypatch.setattr(sizing.os, "statvfs", statvfs)


def test_pools_that_fit_shared_memory_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limits_of(config(max_total_tokens=640))
    wanted = (4 * 11 + 41) * pool_spec().bytes_per_page
    give_shared_memory(monkeypatch, total=2**30, free=-(-wanted // 4096) * 4096)
    check_shared_memory(limits, config())
    give_shared_memory(monkeypatch, total=2**30, free=wanted // 4096 * 4096 - 4096)
    with pytest.raises(CapacityError):
        check_shared_memory(limits, config())


def test_replicated_pools_need_no_shared_memory_but_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = limits_of(config("replicated", max_total_tokens=6400, decode_max_total_tokens=64))
    give_shared_memory(monkeypatch, total=2**30, free=2 * pool_spec().bytes_per_page + 4096)
    check_shared_memory(limits, config())


def test_a_full_shared_memory_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limits_of(config(max_total_tokens=640))
    give_shared_memory(monkeypatch, total=2**33, free=8192)
    with pytest.raises(CapacityError) as refused:
        check_shared_memory(limits, config())
    message = str(refused.value)
    assert "too little shared memory in /dev/shm" in message
    assert f"{85 * pool_spec().bytes_per_page} bytes wanted" in message
    assert "8192 bytes free" in message
    assert "lower --max-total-tokens" in message
    assert "container" not in message


def test_a_containers_64_mb_have_their_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limits_of(config(max_total_tokens=128 * 1024))
    give_shared_memory(monkeypatch, total=64 * MIB, free=64 * MIB)
    with pytest.raises(CapacityError) as refused:
        check_shared_memory(limits, config())
    message = str(refused.value)
    assert "a container's default of 64 MB" in message
    wanted = limits.decode_pool_bytes + 4 * limits.pool_bytes_per_rank
    assert f"--shm-size={-(-wanted // MIB) + 64}m" in message
    assert "lower --max-total-tokens" in message


def test_free_memory_is_the_least_of_ram_and_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_shared_memory(monkeypatch, total=2**33, free=40 * 4096)
    assert sizing.free_memory_bytes() == 40 * 4096
    give_shared_memory(monkeypatch, total=2**60, free=2**60)
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < sizing.free_memory_bytes() <= most
