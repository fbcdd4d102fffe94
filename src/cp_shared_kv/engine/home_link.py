"""A satellite's link to the supervisor of the run that it joins."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import zmq

from cp_shared_kv.engine.abroad import News
from cp_shared_kv.engine.child import ALIVE_SECONDS
from cp_shared_kv.engine.codecs import (
    FROM_SATELLITE,
    TO_SATELLITE,
    FromSatellite,
    ToSatellite,
)
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp
from cp_shared_kv.engine.off_host import is_lost, secure_client
from cp_shared_kv.engine.satellite_messages import (
    Condemned,
    Dismissed,
    Join,
    Leave,
    Refused,
    RunOver,
    StillHere,
    Terms,
)
from cp_shared_kv.engine.waking_time import WakingTime
from cp_shared_kv.errors import ConfigError, ProtocolError, StartStoppedError, StartupError
from cp_shared_kv.transfer.messages import as_reason

ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.1
LONGEST_STEP_SECONDS = 0.5
"""What a pause of this host counts as: it looks five times as often."""
LINGER_MILLISECONDS = 1000


@dataclass(frozen=True)
class SessionEnd:
    """How a session ended: with its run, or so that the satellite may join again."""

    how: Literal["run over", "lost"]
    reason: str
    patience_seconds: float
    """For how long a run that was lost may come back."""


class NobodyError(StartupError):
    """Nobody answers at the address, at least none with these keys."""


class HomeLink:
    """Implements `Abroad` for the supervisor of a satellite: one connection, which is one session.

    `ask` first, by whoever made it; then `watchdog_seconds` is to be set.
    """

    def __init__(self, address: str, keys: ControlKeys) -> None:
        self.watchdog_seconds = ANSWER_SECONDS
        self._address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"satellite-" + secrets.token_hex(8).encode())
        self._socket.linger = LINGER_MILLISECONDS
        self._socket.sndhwm = 0  # so that only a lost link is not to be written to
        secure_client(self._socket, keys)
        try:
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ConfigError(
                "not an address to join", value=address[:80], allowed="HOST:PORT"
            ) from error
        self._known: dict[str, ProcessUp] = {}
        self._waking = WakingTime(LONGEST_STEP_SECONDS)
        self._heard_seconds = self._waking.at(time.monotonic())
        self._next_alive_seconds = 0.0
        self._end: SessionEnd | None = None

    @property
    def end(self) -> SessionEnd | None:
        """How the session ended; None while it stands. For other threads, too."""
        return self._end

    def ask(self, join: Join, stop_asked: threading.Event) -> Terms:
        """Join; returns the terms. NobodyError; StartupError with the reason of a refusal."""
        self._send(join)
        deadline = self._waking.at(time.monotonic()) + ANSWER_SECONDS
        while (awake_seconds := self._waking.at(time.monotonic())) < deadline and not is_lost(
            self._socket
        ):
            if stop_asked.is_set():
                raise StartStoppedError("stopped while joining")
            if not self._socket.poll(int(POLL_SECONDS * 1000)):
                continue
            match self._receive():
                case Terms() as terms:
                    self._heard_seconds = awake_seconds
                    return terms
                case Refused(reason=reason):
                    raise StartupError(f"the run at {self._address} refuses: {reason}")
                case _:
                    pass
        raise NobodyError(
            f"nobody at {self._address} answers with these keys",
            change="start the run with --control-host and the same --control-keys, and see that no "
            "firewall is between",
        )

    def exchange(self, now_seconds: float) -> list[News]:
        """Hear the supervisor; see `end` for whether it still speaks."""
        awake_seconds = self._waking.at(now_seconds)
        news: list[News] = []
        while self._end is None and self._socket.poll(0):
            self._heard_seconds = awake_seconds
            try:
                message = self._receive()
            except ProtocolError as error:
                self._ended("lost", str(error))
                break
            match message:
                case ProcessUp() | ProcessDown():
                    self._note(message)
                    news.append(message)
                case Condemned():
                    news.append(message)
                case RunOver():
                    self._ended("run over", message.reason)
                case Dismissed():
                    self._ended("lost", f"dismissed: {message.reason}")
                case Terms() | Refused() | StillHere():
                    pass
        if now_seconds >= self._next_alive_seconds:
            self._next_alive_seconds = now_seconds + ALIVE_SECONDS
            self._send(StillHere())
        silence = awake_seconds - self._heard_seconds
        if self._end is None and is_lost(self._socket):
            self._ended("lost", "the connection is lost")
        elif self._end is None and silence > self.watchdog_seconds:
            self._ended("lost", f"silent for {silence:.0f} s (--watchdog-timeout)")
        return news

    def known(self) -> list[ProcessUp]:
        """The server, when it is up."""
        return list(self._known.values())

    def tell(self, news: ProcessUp | ProcessDown) -> None:
        """A decode worker of this host is up or over."""
        self._send(news)

    def gave_up(self, life: Life, reason: str) -> None:
        """Decode workers give nobody up: they end."""

    def close(self, reason: str) -> None:
        """All workers are reaped. Again: no effect."""
        if not self._socket.closed:
            self._send(Leave(reason=as_reason(reason)))
            self._socket.close()
            self._context.term()  # waits, for the last word to leave

    def _ended(self, how: Literal["run over", "lost"], reason: str) -> None:
        self._end = SessionEnd(how, reason, self.watchdog_seconds)

    def _note(self, news: ProcessUp | ProcessDown) -> None:
        unit = Life.parse(news.life).unit
        if isinstance(news, ProcessUp):
            self._known[unit] = news
        else:
            self._known.pop(unit, None)

    def _receive(self) -> ToSatellite:
        return TO_SATELLITE.decode(self._socket.recv_multipart()[-1])

    def _send(self, message: FromSatellite) -> None:
        with suppress(zmq.Again):  # the link is lost, which `exchange` finds out
            self._socket.send(FROM_SATELLITE.encode(message), zmq.NOBLOCK)
