"""What a run tells a satellite that joins it, and what the satellite makes of it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.model_spec import describe_model
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.satellite_messages import Terms
from cp_shared_kv.errors import CheckpointError, ConfigError, CpkvError, ProtocolError

NOT_TOLD = frozenset(
    {"api_key", "host", "port", "control_host", "control_port", "control_keys", "record_batches"}
)
"""Settings that are of no concern to a decode worker on another host: secrets, and this host's."""


def terms_of(spec: RunSpec, lives: tuple[str, ...]) -> Terms:
    """What a satellite with decode workers of these lives has to know of a run."""
    return Terms(
        config={name: value for name, value in spec.config.items() if name not in NOT_TOLD},
        limits=spec.limits,
        page_layout=spec.page_layout,
        model_fingerprint=spec.model_fingerprint,
        lives=lives,
    )


def joined_spec(
    terms: Terms, *, run_dir: Path, model_path: Path | None, host: str, keys: Path
) -> RunSpec:
    """The run of a satellite at `host`: by the terms, with the model that is on this host.

    `model_path` None looks for it where the run has it. ConfigError or CheckpointError if the
    model is missing or another; ProtocolError for terms that contradict themselves.
    """
    config = _joined_config(terms, model_path, host, keys)
    model = describe_model(config)
    ours, theirs = (model.fingerprint, model.page_layout), terms.page_layout
    if ours != (terms.model_fingerprint, theirs):
        raise CheckpointError(
            "the model on this host is not that of the run",
            value=f"{config.model_path} has the fingerprint {model.fingerprint}",
            allowed=terms.model_fingerprint,
            change="copy the run's checkpoint to this host and name it with --model-path",
        )
    limits = terms.limits
    if (limits.page_size, limits.cp_size, limits.shared) != (
        config.page_size,
        config.cp_size,
        config.shares_kv,
    ):
        raise ProtocolError("the run's sizes are not those of its config")
    return RunSpec(
        # Not the run's own: what it names belongs to this host, and is removed with this run.
        run_id=secrets.token_hex(4),
        run_dir=str(run_dir),
        supervisor_pid=os.getpid(),
        config=config.as_plain(),
        limits=limits,
        page_layout=model.page_layout,
        model_fingerprint=model.fingerprint,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        joined=True,
    )


def _joined_config(terms: Terms, model_path: Path | None, host: str, keys: Path) -> EngineConfig:
    settings = {name: value for name, value in terms.config.items() if name not in NOT_TOLD}
    settings["decode_workers"] = len(terms.lives)
    settings |= {"control_host": host, "control_keys": str(keys)}
    if model_path is not None:
        settings["model_path"] = str(model_path)
    try:
        config = EngineConfig.from_plain(settings)
    except CpkvError:
        raise
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"the run's config cannot be read: {error}") from error
    if not (config.model_path / "config.json").exists():
        raise ConfigError(
            "the run's model is not on this host",
            value=config.model_path,
            change="copy the checkpoint to this host and name it with --model-path",
        )
    return config
