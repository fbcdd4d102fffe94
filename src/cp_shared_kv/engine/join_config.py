"""What a satellite is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.host_address import check_host
from cp_shared_kv.engine.satellite_messages import MAX_GUESTS
from cp_shared_kv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class JoinConfig:
    """Whom to join, and with what. ConfigError for what is out of range, and without keys."""

    address: str
    """`HOST:PORT` of the run."""
    control_keys: Path
    control_host: str
    """This host's address."""
    decode_workers: int = 1
    model_path: Path | None = None
    """The run's model on this host; by default it lies where the run has it."""

    def __post_init__(self) -> None:
        host, colon, port = self.address.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ConfigError(
                "not an address to join",
                value=repr(self.address[:80]),
                allowed="HOST:PORT, as `cpkv serve` shows it",
            )
        check_host("--control-host", self.control_host)
        if not 1 <= self.decode_workers <= MAX_GUESTS:
            raise ConfigError(
                "--decode-workers is out of range",
                value=self.decode_workers,
                allowed=f"1 to {MAX_GUESTS}",
            )
        ControlKeys.load(self.control_keys)
