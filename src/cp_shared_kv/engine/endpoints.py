"""Where the processes of one cluster on one host find each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cp_shared_kv.engine.lives import Life


@dataclass(frozen=True)
class Endpoints:
    """The `ipc://` sockets of a run, below its private directory (mode 0700).

    Every life of a unit has a socket of its own: a message that was on its way to a process that
    is gone goes nowhere, instead of to its successor.
    """

    run_dir: Path

    @property
    def supervisor(self) -> str:
        """Children report here, and hear from here who came and who is gone."""
        return self._ipc("supervisor")

    def inbox(self, life: Life) -> str:
        """Of a server: tokens, refusals, figures. Of a decode worker: the door for controllers
        and ranks. Of a prefill group: the controller's door for its ranks."""
        return self._ipc(str(life))

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir}/{name}.sock"
