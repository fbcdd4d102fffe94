"""A satellite: decode workers on this host, for a run whose supervisor is on another.

It joins, starts its workers, and passes news on: down from the run's supervisor, up from its own.
When the link breaks, the run counts its workers as gone; so it ends them, and joins again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cp_shared_kv._version import __version__
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.home_link import HomeLink, NobodyError, SessionEnd
from cp_shared_kv.engine.join_config import JoinConfig
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.run_dir import RunDir
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.satellite_messages import Join, Terms
from cp_shared_kv.engine.sizing import free_ram_bytes
from cp_shared_kv.engine.spawning import Spawner
from cp_shared_kv.engine.supervisor import Supervisor
from cp_shared_kv.engine.terms import joined_spec
from cp_shared_kv.errors import CapacityError, StartStoppedError, StartupError

POLL_SECONDS = 0.1
JOIN_AGAIN_SECONDS = 1.0

logger = logging.getLogger("cp_shared_kv")


class Satellite:
    """Runs until the run ends, or `stop_asked` is set. `joined` is told when its workers are ready,
    with their names; `log_file` takes what they would write to stderr."""

    def __init__(
        self,
        config: JoinConfig,
        stop_asked: threading.Event,
        *,
        joined: Callable[[list[str]], None],
        log_file: Path | None = None,
    ) -> None:
        self._config = config
        self._stop_asked = stop_asked
        self._joined = joined
        self._log_file = log_file

    def run(self) -> Literal["stopped", "run over"]:
        """Join, and join again whenever the link is lost. StartupError, and others of a start, when
        that cannot be; nothing is left running."""
        give_up_seconds = time.monotonic()
        while True:
            try:
                end = self._session()
            except StartStoppedError:
                return "stopped"
            except NobodyError:
                if time.monotonic() >= give_up_seconds:
                    raise
            else:
                if end is None:
                    return "stopped"
                if end.how == "run over":
                    return "run over"
                give_up_seconds = time.monotonic() + end.patience_seconds
                logger.error(
                    "the run at %s is lost: %s; joining again", self._config.address, end.reason
                )
            if self._stop_asked.wait(JOIN_AGAIN_SECONDS):
                return "stopped"

    def _session(self) -> SessionEnd | None:
        """From a connection to its end; None when it was asked to stop."""
        config = self._config
        link = HomeLink(config.address, ControlKeys.load(config.control_keys))
        join = Join(release=__version__, host=config.control_host, workers=config.decode_workers)
        why = "it was stopped"
        try:
            session = _Session(link, config, link.ask(join, self._stop_asked), self._log_file)
            try:
                return session.watch(self._stop_asked, self._joined)
            finally:
                session.stop()
        except Exception as error:
            why = str(error)
            raise
        finally:
            link.close(why)


class _Session:
    """The processes of one session."""

    def __init__(
        self, link: HomeLink, config: JoinConfig, terms: Terms, log_file: Path | None
    ) -> None:
        self._link = link
        self._run_dir = RunDir()
        try:
            spec = joined_spec(
                terms,
                run_dir=self._run_dir.path,
                model_path=config.model_path,
                host=config.control_host,
                keys=config.control_keys,
            )
            _check_memory(spec)
            link.watchdog_seconds = spec.engine_config().watchdog_timeout
            self._supervisor = Supervisor(
                spec.endpoints,
                Spawner(spec, spec.save(), None, log_file),
                [Life.parse(life) for life in terms.lives],
                start_seconds=spec.engine_config().start_timeout,
                watchdog_seconds=link.watchdog_seconds,
                abroad=link,
            )
        except BaseException:
            self._run_dir.remove()
            raise

    def watch(
        self, stop_asked: threading.Event, joined: Callable[[list[str]], None]
    ) -> SessionEnd | None:
        """Start the workers, and wait for an end. StartupError when they cannot go on."""
        supervisor = self._supervisor
        supervisor.start()
        told = False
        while self._link.end is None and not stop_asked.wait(POLL_SECONDS):
            if supervisor.fatal is not None:
                raise StartupError(supervisor.fatal)
            ready, total, _ = supervisor.progress()
            if ready == total and total and not told:
                told = True
                supervisor.start_is_over()
                joined(supervisor.units())
        return self._link.end

    def stop(self) -> None:
        """End the workers; the run is told."""
        self._supervisor.stop()
        self._run_dir.remove()


def _check_memory(spec: RunSpec) -> None:
    wanted = spec.engine_config().decode_workers * spec.limits.decode_pool_bytes
    free = free_ram_bytes()
    if wanted > free:
        raise CapacityError(
            "the pools of the decode workers do not fit this host",
            value=f"{wanted} bytes",
            allowed=f"{free} bytes of free memory",
            change="lower --decode-workers here, or --decode-max-total-tokens of the run",
        )
