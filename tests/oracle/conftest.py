"""One oracle model a session: its checkpoint, transformers on it, and the cases' schedules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from cp_shared_kv.testing.oracle_cases import (
    NEW_TOKENS,
    ORACLE_SHAPE,
    PROMPT_TOKENS,
    oracle_schedules,
    prompt,
)
from cp_shared_kv.testing.schedule import Schedule
from cp_shared_kv.testing.tiny_models import make_tiny_checkpoint
from cp_shared_kv.testing.transformers_oracle import TransformersOracle


@dataclass(frozen=True)
class OracleModel:
    checkpoint: Path
    oracle: TransformersOracle
    generated: list[int]
    schedules: dict[str, Schedule]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> OracleModel:
    checkpoint = tmp_path_factory.mktemp("oracle") / "model"
    make_tiny_checkpoint(checkpoint, ORACLE_SHAPE, seed=0)
    oracle = TransformersOracle(checkpoint)
    generated = oracle.generate(prompt(1, PROMPT_TOKENS), NEW_TOKENS)
    return OracleModel(checkpoint, oracle, generated, oracle_schedules(generated))
