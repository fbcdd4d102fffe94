"""A decode worker whose prefill groups and server are on another host: what it can know of them.

From here nobody sees their processes or the far ends of their connections. What is in doubt for too
long ends the worker: its satellite starts it afresh, and nothing on its way can harm that life.
"""

from __future__ import annotations

from typing import Any

import zmq

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.off_host import OffHostDoor, is_lost
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.errors import CpkvError, InvariantError

CONTACT_SECONDS = 5.0
"""How long a link to the server may take to stand."""
EXPLANATION_SECONDS = 5.0
"""How long the news that the server is gone may come behind the end of the link to it."""


class JoinedWorker:
    """Opens a decode worker's door to another host, and looks after what comes from there."""

    def __init__(self, spec: RunSpec, door: zmq.Socket[Any]) -> None:
        keys, host = spec.control_keys(), spec.engine_config().control_host
        if keys is None or host is None:
            raise InvariantError("a worker that joined has no address or keys")
        self.keys = keys
        self._watchdog_seconds = spec.engine_config().watchdog_timeout
        self._door = OffHostDoor(door, host, 0, keys)
        self._link_lost_seconds: float | None = None

    @property
    def address(self) -> str:
        """Where groups of the other host reach the worker."""
        return self._door.address

    def check_server(
        self, server: zmq.Socket[bytes] | None, life: Life | None, now_seconds: float
    ) -> None:
        """CpkvError if the link to the server is lost and the server is not: answers would be."""
        if server is None or not is_lost(server):
            self._link_lost_seconds = None
        elif self._link_lost_seconds is None:
            self._link_lost_seconds = now_seconds
        elif now_seconds - self._link_lost_seconds > EXPLANATION_SECONDS:
            raise CpkvError(f"the link to {life} is lost")

    def check_ending(self, life: Life, since_seconds: float, now_seconds: float) -> None:
        """CpkvError if pages of a group that is gone have been kept for too long."""
        if now_seconds - since_seconds > self._watchdog_seconds:
            raise CpkvError(
                f"what {life} had sent when it was lost may still be on its way",
                value=f"{now_seconds - since_seconds:.0f} s",
                allowed=f"--watchdog-timeout {self._watchdog_seconds} s",
            )
