"""Which transport a config gets, and what is said of the one that strangers can reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cp_shared_kv.engine import transfer_ends
from cp_shared_kv.engine.config import EngineConfig


@pytest.mark.parametrize(("backend", "warned"), [("shared_memory", False), ("mooncake", True)])
def test_a_worker_whose_pool_strangers_can_reach_says_so(
    backend: Any, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[tuple[str, str, str | None]] = []
    monkeypatch.setattr(
        transfer_ends,
        "make_target",
        lambda kind, name, device, host: made.append((kind, name, host)),
    )
    config = EngineConfig(model_path=Path("/m"), disaggregation_transfer_backend=backend)
    transfer_ends.decode_target(config, "decode", torch.device("cpu"), None)
    assert made == [(backend, "decode", None)]
    assert ("read and write this worker's KV pool" in caplog.text) == warned
