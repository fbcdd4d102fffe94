"""How the plugin's ranks read cached prefixes: what may be asked for, and what comes of it."""

from __future__ import annotations

import logging
from typing import cast

import pytest
import torch
import torch.distributed as dist

from cp_shared_kv.errors import ConfigError, StartupError
from cp_shared_kv.integrations.sglang import pools
from cp_shared_kv.integrations.sglang.settings import READ, READS, read

CPU = torch.device("cpu")
NOBODY = cast(dist.ProcessGroup, None)


def test_auto_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(READ, raising=False)
    assert read() == "auto"
    for wanted in READS:
        monkeypatch.setenv(READ, wanted)
        assert read() == wanted


def test_anything_else_is_refused_with_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READ, "push")
    with pytest.raises(ConfigError, match="auto, pull, collective"):
        read()


@pytest.mark.parametrize(("wanted", "reason"), [
    ("auto", "no CUDA"), ("collective", "CPKV_SGLANG_READ=collective"),
])  # fmt: skip
def test_where_nothing_can_be_pulled_it_goes_by_all_gather_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wanted: str, reason: str
) -> None:
    monkeypatch.setenv(READ, wanted)
    with caplog.at_level(logging.INFO):
        assert not pools._pulled(NOBODY, CPU)
    assert f"go by all-gather ({reason})" in caplog.text


def test_who_insists_on_pulling_does_not_start_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READ, "pull")
    with pytest.raises(StartupError, match="CPKV_SGLANG_READ=auto or collective"):
        pools._pulled(NOBODY, CPU)
