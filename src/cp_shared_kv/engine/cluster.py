"""The processes of one host as one object: sized, started, stopped, and their files removed."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.gpu_memory import check_gpu_memory, gpu_places
from cp_shared_kv.engine.gpus import check_gpus, look_at_gpus
from cp_shared_kv.engine.guest_door import GuestDoor
from cp_shared_kv.engine.guests import Guests
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.lives import Life, first_lives
from cp_shared_kv.engine.model_spec import ModelDescription, describe_model
from cp_shared_kv.engine.recording import check_recording_place
from cp_shared_kv.engine.run_dir import RunDir
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.sizing import (
    check_shared_memory,
    free_memory_bytes,
    resolve_limits,
)
from cp_shared_kv.engine.spawning import STOP_SECONDS, Spawner
from cp_shared_kv.engine.supervisor import Supervisor
from cp_shared_kv.engine.terms import terms_of
from cp_shared_kv.errors import ConfigError, InvariantError, StartStoppedError, StartupError
from cp_shared_kv.memory.buffers import remove_stale_segments
from cp_shared_kv.memory.segment_names import SHARED_MEMORY_DIRECTORY
from cp_shared_kv.transfer.transports import TransferBackend

POLL_SECONDS = 0.05
SERVER = "server-0"

Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done, and of how much."""


def no_progress(_what: str, _done: int, _total: int) -> None:
    """For callers that show nothing."""


class Cluster:
    """The prefill groups, decode workers and the server of one run.

    A context manager: leaving it stops every child and removes what they left in /dev/shm. What
    dies meanwhile is started again. `listener` is the server's bound socket (None runs no
    server: then the caller takes its place); `log_file` takes what the children would write to
    stderr; `stop_asked` ends a start with `StartStoppedError`. Raises `StartupError`,
    `ConfigError`, `CapacityError` or `CheckpointError` before or while starting, with nothing
    left running.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        listener: socket.socket | None = None,
        log_file: Path | None = None,
        stop_asked: threading.Event | None = None,
        on_progress: Progress = no_progress,
    ) -> None:
        self.config = config
        self._listener = listener
        self._log_file = log_file
        self._stop_asked = stop_asked
        self._on_progress = on_progress
        self._run_dir: RunDir | None = None
        check_backend(config.disaggregation_transfer_backend)
        if config.record_batches is not None:
            check_recording_place(config.record_batches)
        remove_stale_segments()
        model = describe_model(config)
        self.limits: EngineLimits = _sized(config, model)
        self._model = model
        self._spec: RunSpec | None = None
        self._spawner: Spawner | None = None
        self._guest_door: GuestDoor | None = None
        self._supervisor: Supervisor | None = None

    @property
    def spec(self) -> RunSpec:
        """What the children were told. InvariantError before the start."""
        if self._spec is None:
            raise InvariantError("a cluster was asked for its run before its start")
        return self._spec

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        self._run_dir = RunDir()
        self._spec = RunSpec(
            run_id=secrets.token_hex(4),
            run_dir=str(self._run_dir.path),
            supervisor_pid=os.getpid(),
            # It is written to a file, and the key to none.
            config=replace(self.config, api_key=None).as_plain(),
            limits=self.limits,
            page_layout=self._model.page_layout,
            model_fingerprint=self._model.fingerprint,
            vocab_size=self._model.config.vocab_size,
            eos_token_ids=self._model.config.eos_token_ids,
        )
        self._spawner = Spawner(
            self._spec,
            self._spec.save(),
            self._listener,
            self._log_file,
            api_key=self.config.api_key,
        )
        self._guest_door = self._open_to_guests()
        self._supervisor = Supervisor(
            self._spec.endpoints,
            self._spawner,
            first_lives(
                self.config.prefill_groups,
                self.config.decode_workers,
                server=self._spawner.has_server,
            ),
            start_seconds=self.config.start_timeout,
            watchdog_seconds=self.config.watchdog_timeout,
            abroad=self._guests(self._spec),
            caller_serves=not self._spawner.has_server,
        )
        self._supervisor.start()
        self._await_ready(self._supervisor)
        self._supervisor.start_is_over()

    def _open_to_guests(self) -> GuestDoor | None:
        host, keys = self.config.control_host, self.spec.control_keys()
        if host is None or keys is None:
            return None
        if self._listener is None:
            raise ConfigError("--control-host needs the server of the run", value=host)
        return GuestDoor(host, self.config.control_port, keys)

    def _guests(self, spec: RunSpec) -> Guests | None:
        if self._guest_door is None:
            return None
        return Guests(
            self._guest_door,
            partial(terms_of, spec),
            first_index=self.config.decode_workers,
            watchdog_seconds=self.config.watchdog_timeout,
        )

    def _await_ready(self, supervisor: Supervisor) -> None:
        while True:
            ready, total, _ = supervisor.progress()
            self._on_progress("starting processes", ready, total)
            if supervisor.fatal is not None:
                raise StartupError(supervisor.fatal)
            if ready == total and total:
                return
            if self._stop_asked is not None and self._stop_asked.is_set():
                raise StartStoppedError("stopped while starting")
            time.sleep(POLL_SECONDS)

    @property
    def fatal(self) -> str | None:
        """Why the run cannot go on: something failed to start again and again. Else None."""
        return self._running().fatal

    @property
    def join_address(self) -> str | None:
        """Where decode workers of other hosts join, `HOST:PORT`; None if they cannot."""
        return None if self._guest_door is None else self._guest_door.address

    def pid(self, name: str) -> int:
        """Process id of a child such as `prefill-0`, `prefill-0/rank-1`, `decode-0`, `server-0`.

        KeyError while it has none: it is being started again.
        """
        return self._running().pid(name)

    def life(self, unit: str) -> Life:
        """The present life of `prefill-0`, `decode-0` or `server-0`. KeyError while it has none."""
        return self._running().life(unit)

    def is_ready(self, unit: str) -> bool:
        """Whether all processes of a unit are up."""
        return self._running().is_ready(unit)

    def take_over(self, unit: str) -> None:
        """Stop a unit's main process for good (the replay tool takes a controller's place)."""
        self._running().retire(unit)

    def drain(self, hurry: threading.Event) -> None:
        """Let the server end its answers under way: up to --shutdown-timeout, or until `hurry` is
        set or the run is lost. To call before `stop`, which waits for nobody's answer."""
        supervisor = self._running()
        if not supervisor.retire_softly(SERVER):
            return
        deadline = time.monotonic() + self.config.shutdown_timeout + STOP_SECONDS
        while time.monotonic() < deadline and supervisor.fatal is None:
            try:
                supervisor.life(SERVER)
            except KeyError:
                return
            if hurry.wait(POLL_SECONDS):
                return

    def stop(self) -> None:
        """Stop every child and remove the run's files. Safe to call twice."""
        if self._supervisor is not None:
            self._supervisor.stop()
        if self._guest_door is not None:
            self._guest_door.close()
        if self._spawner is not None:
            self._spawner.close()
        if self._run_dir is None:
            return
        if self._spec is not None:
            for region in Path(SHARED_MEMORY_DIRECTORY).glob(f"cpkv-{self._spec.run_id}-*"):
                region.unlink(missing_ok=True)
        self._run_dir.remove()
        self._run_dir = None

    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise InvariantError("a cluster was asked for its processes before its start")
        return self._supervisor


def check_backend(backend: TransferBackend) -> None:
    """ConfigError for a transfer backend whose package is not installed."""
    if backend == "mooncake" and find_spec("mooncake") is None:
        raise ConfigError(
            "--disaggregation-transfer-backend needs a package that is not installed",
            value=backend,
            allowed="shared_memory",
            change="pip install 'cp-shared-kv[mooncake]'",
        )


def _sized(config: EngineConfig, model: ModelDescription) -> EngineLimits:
    """The sizes of a run, from the memory that it will keep KV in. Raises what it cannot run on."""
    spec, context_length = model.pool_spec, model.context_length
    if config.device == "cuda":
        gpus = look_at_gpus()
        check_gpus(config, spec, gpus)
        places = gpu_places(config, model, gpus)
        limits = resolve_limits(config, spec, context_length, gpus=places)
        check_gpu_memory(limits, places)
        return limits
    limits = resolve_limits(config, spec, context_length, free_bytes=free_memory_bytes())
    check_shared_memory(limits, config)
    return limits
