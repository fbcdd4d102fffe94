"""Where the processes of one cluster on one host find each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Endpoints:
    """The `ipc://` sockets of a run, below its private directory (mode 0700)."""

    run_dir: Path

    @property
    def supervisor(self) -> str:
        """Children report here that they are ready, or why they are not."""
        return self._ipc("supervisor")

    @property
    def server(self) -> str:
        """The server's inbox: tokens, refusals, figures."""
        return self._ipc("server")

    @property
    def ranks(self) -> str:
        """The controller's door for its ranks."""
        return self._ipc("ranks")

    @property
    def decode(self) -> str:
        """The decode worker's door for the controller and the ranks."""
        return self._ipc("decode")

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir}/{name}.sock"
