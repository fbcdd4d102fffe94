"""The oracle's models: a checkpoint, transformers on it, and the cases' schedules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.testing.oracle_cases import (
    NEW_TOKENS,
    ORACLE_SHAPES,
    PROMPT_TOKENS,
    oracle_schedules,
    prompt,
)
from cp_shared_kv.testing.schedule import Schedule
from cp_shared_kv.testing.transformers_oracle import TransformersOracle


@dataclass(frozen=True)
class OracleModel:
    checkpoint: Path
    oracle: TransformersOracle
    generated: list[int]
    schedules: dict[str, Schedule]


@pytest.fixture(scope="session")
def made_models() -> dict[str, OracleModel]:
    """Those that a test has asked for, by name; each is made once a session."""
    return {}


@pytest.fixture
def model(
    request: pytest.FixtureRequest,
    made_models: dict[str, OracleModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> OracleModel:
    """A model of ORACLE_SHAPES; tests name it as the fixture's parameter."""
    name: str = request.param
    if name not in made_models:
        checkpoint = tmp_path_factory.mktemp("oracle") / "model"
        make_tiny_checkpoint(checkpoint, ORACLE_SHAPES[name], seed=0)
        oracle = TransformersOracle(checkpoint)
        generated = oracle.generate(prompt(1, PROMPT_TOKENS), NEW_TOKENS)
        schedules = oracle_schedules(generated)
        made_models[name] = OracleModel(checkpoint, oracle, generated, schedules)
    return made_models[name]
