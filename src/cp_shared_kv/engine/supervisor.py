"""Watches the processes of one run: who is up, who is gone, who is started again.

What dies takes its unit along: a prefill group's ranks share every prompt and its controller has
their books, so none of them is of use without the others. The rest of the run hears of it, and
goes on; the unit is started again under a new life. Only what the kernel reaped counts as dead.
Processes of other hosts come and go by the word of their own supervisor (abroad.py).
"""

from __future__ import annotations

import logging
import threading
import time

from cp_shared_kv.engine.abroad import Abroad
from cp_shared_kv.engine.child import ChildReport
from cp_shared_kv.engine.child_links import ChildLinks
from cp_shared_kv.engine.endpoints import Endpoints
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp
from cp_shared_kv.engine.restarts import MAX_FAILED_STARTS, Restarts
from cp_shared_kv.engine.satellite_messages import Condemned
from cp_shared_kv.engine.spawning import Spawner, kill_processes, stop_processes
from cp_shared_kv.engine.unit import Unit, process_name
from cp_shared_kv.engine.waking_time import WakingTime
from cp_shared_kv.transfer.messages import as_reason

POLL_SECONDS = 0.1
LONGEST_STEP_SECONDS = 0.5
"""What a pause of the supervisor itself counts as, while it judges others."""
LAST_WORDS_SECONDS = 0.2
"""How long the report of a child that has just ended may still be on its way."""

logger = logging.getLogger("cp_shared_kv")


class Supervisor:
    """One thread that owns the children of a run. The public methods are for other threads.

    `start_seconds` is how long the slowest child may take to load its weights and report,
    `watchdog_seconds` how long one may be silent before it counts as hung and is killed.
    `abroad` are the other hosts of the run, if it has any. `caller_serves`: who made this takes the
    place of the server.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        spawner: Spawner,
        units: list[Life],
        *,
        start_seconds: float,
        watchdog_seconds: float,
        abroad: Abroad | None = None,
        caller_serves: bool = False,
    ) -> None:
        self._endpoints = endpoints
        self._spawner = spawner
        self._first_lives = units
        self._start_seconds = start_seconds
        self._watchdog_seconds = watchdog_seconds
        self._abroad = abroad
        self._caller_serves = caller_serves
        self._lock = threading.RLock()
        self._units: dict[str, Unit] = {}
        self._restarts = Restarts()
        self._retired: set[str] = set()
        self._leaving: set[str] = set()
        """Retired units whose end is awaited."""
        self._start_over = False
        self._fatal: str | None = None
        self._stopping = threading.Event()
        self._waking = WakingTime(LONGEST_STEP_SECONDS)
        self._now_seconds = 0.0
        """Waking time at which the present turn began; all times that are kept are such."""
        self._links = ChildLinks(endpoints.supervisor)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    # For other threads ------------------------------------------------------------------------

    def start(self) -> None:
        """Start every unit; see `progress` for how far they are."""
        self._thread.start()

    def progress(self) -> tuple[int, int, list[str]]:
        """Processes that are ready, of how many, and the names of the others."""
        with self._lock:
            ready = sum(len(unit.ready) for unit in self._units.values())
            waiting = [
                process_name(identity)
                for unit in self._units.values()
                for identity in unit.processes.keys() - unit.ready
            ]
            return ready, ready + len(waiting), sorted(waiting)

    def start_is_over(self) -> None:
        """From now on what dies is started again; until now it was fatal."""
        with self._lock:
            self._start_over = True

    @property
    def fatal(self) -> str | None:
        """Why this run cannot go on, or None while it can."""
        return self._fatal

    def pid(self, name: str) -> int:
        """Process id of the present life of, for example, `prefill-0/rank-1`. KeyError: none."""
        with self._lock:
            for unit in self._units.values():
                for identity, process in unit.processes.items():
                    if process_name(identity) == name:
                        return process.pid
        raise KeyError(name)

    def life(self, unit: str) -> Life:
        """The present life of a unit. KeyError while it has none."""
        with self._lock:
            return self._units[unit].life

    def is_ready(self, unit: str) -> bool:
        """Whether the unit lives and all its processes are ready."""
        with self._lock:
            return unit in self._units and self._units[unit].is_ready

    def units(self) -> list[str]:
        """The names of the units that live."""
        with self._lock:
            return sorted(self._units)

    def retire(self, unit: str) -> None:
        """Stop a unit's main process for good. Nobody is told; what is left of the unit is not
        started again, and its end is that of the run."""
        with self._lock:
            self._retired.add(unit)
            self._restarts.cancel(unit)
            running = self._units[unit]
            stop_processes([running.processes.pop(running.life.identity)])

    def retire_softly(self, unit: str) -> bool:
        """SIGTERM to a unit's main process; it may take its time. False if there is none."""
        with self._lock:
            self._leaving.add(unit)
            self._restarts.cancel(unit)
            running = self._units.get(unit)
            if running is None:
                return False
            running.processes[running.life.identity].terminate()
            return True

    def stop(self) -> None:
        """Stop every child; returns when all are reaped. Safe to call twice."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._close_links()

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        # Children are killed by the kernel when the thread that started them ends: so it ends
        # last, and everything that starts a child happens here.
        try:
            for life in self._first_lives:
                with self._lock:
                    self._units[life.unit] = self._spawner.spawn(life, self._now_seconds)
            while not self._stopping.is_set():
                self._now_seconds = self._waking.at(time.monotonic())
                self._links.receive(POLL_SECONDS, self._take_report)
                with self._lock:
                    self._hear_abroad()
                    for unit in list(self._units.values()):
                        self._look_after(unit)
                    self._start_due()
        except Exception as error:
            logger.exception("the supervisor failed")
            self._fatal = f"the supervisor failed: {type(error).__name__}: {error}"
        finally:
            with self._lock:
                stop_processes(
                    [p for unit in self._units.values() for p in unit.processes.values()]
                )
                self._units.clear()
            self._close_links()

    def _take_report(self, identity: bytes, report: ChildReport) -> None:
        with self._lock:
            self._take(identity, report)

    def _take(self, identity: bytes, report: ChildReport) -> None:
        unit = next((u for u in self._units.values() if identity in u.processes), None)
        if unit is None:
            return  # of an earlier life, which is over
        is_main = identity == unit.life.identity
        if is_main:
            unit.heard_seconds = self._now_seconds
        match report.state:
            case "started" if is_main:
                unit.listens = True
                for news in self._reachable():
                    self._links.send(unit.life, news)
                if unit.life.role == "prefill":  # it seeks out the others; the server must know it
                    unit.reachable = True
                    self._tell(self._up(unit.life))
            case "reachable" if is_main:
                unit.reachable, unit.address = True, report.address
                self._tell(self._up(unit.life))
                if self._abroad is not None and unit.address:
                    self._abroad.tell(ProcessUp(life=str(unit.life), address=unit.address))
            case "gave_up" if self._abroad is not None:
                self._abroad.gave_up(Life.parse(report.peer), report.reason)
            case "ready":
                unit.ready.add(identity)
                if unit.is_ready:
                    self._restarts.ready(unit.life.unit)
                    if unit.life.number > 1:
                        logger.warning("%s is back", unit.life.unit)
            case "failed":
                unit.failed[identity] = report.reason
            case _:
                pass

    def _look_after(self, unit: Unit) -> None:
        if unit.over is None:
            unit.over = self._why_over(unit)
        name = unit.life.unit
        if unit.over is None or not self._restarts.may_try(name, self._now_seconds):
            return
        kill_processes(unit.processes.values())
        try:
            self._spawner.clean_up(unit.life)
        except OSError as error:
            self._try_again(name, f"the end of {unit.life}", error)
            return
        self._restarts.accepted(name)
        del self._units[name]
        self._lost(unit, unit.over)

    def _why_over(self, unit: Unit) -> str | None:
        ended = unit.ended()
        if ended is not None and ended not in unit.failed:
            self._links.receive(LAST_WORDS_SECONDS, self._take_report)
            ended = unit.ended()
        if ended is not None:
            return unit.how_it_ended(ended)
        return unit.overdue(
            self._now_seconds,
            start_seconds=self._start_seconds,
            watchdog_seconds=self._watchdog_seconds,
        )

    def _lost(self, unit: Unit, reason: str) -> None:
        name = unit.life.unit
        if name in self._leaving:
            return
        if not self._start_over or name in self._retired:
            when = "" if self._start_over else "the start failed: "
            self._fatal = self._fatal or f"{when}{reason}"
            return
        down = ProcessDown(life=str(unit.life), reason=as_reason(reason))
        self._tell(down)
        if self._abroad is not None:
            self._abroad.tell(down)
        pause = self._restarts.over(
            unit.life,
            self._now_seconds,
            born_seconds=unit.born_seconds,
            ready=unit.is_ready,
            condemned=unit.condemned is not None,
        )
        if pause is None:
            self._fatal = (
                self._fatal
                or f"{reason}; {name} failed to start {MAX_FAILED_STARTS} times in a row"
            )
            return
        logger.error("%s; %s starts again%s", reason, name, f" in {pause:.0f} s" if pause else "")

    def _start_due(self) -> None:
        for life in self._restarts.due(self._now_seconds):
            try:
                self._units[life.unit] = self._spawner.spawn(life, self._now_seconds)
            except OSError as error:
                self._try_again(life.unit, f"the start of {life}", error)
                continue
            self._restarts.started(life.unit)

    def _try_again(self, name: str, what: str, error: OSError) -> None:
        # Not the end of the run: somebody else may have taken what there is, for a while.
        if self._restarts.refused(name, self._now_seconds):
            logger.error("the system refuses %s, which is tried again: %s", what, error)

    # News -------------------------------------------------------------------------------------

    def _reachable(self) -> list[ProcessUp]:
        lives = [unit.life for unit in self._units.values() if unit.reachable]
        if self._caller_serves:
            lives.append(Life("server", 0, 1))
        abroad = [] if self._abroad is None else self._abroad.known()
        return [self._up(life) for life in lives] + abroad

    def _up(self, life: Life) -> ProcessUp:
        return ProcessUp(life=str(life), address=self._endpoints.inbox(life))

    def _tell(self, news: ProcessUp | ProcessDown) -> None:
        for unit in self._units.values():
            if unit.listens:
                self._links.send(unit.life, news)

    def _hear_abroad(self) -> None:
        if self._abroad is None:
            return
        for news in self._abroad.exchange(time.monotonic()):
            if not isinstance(news, Condemned):
                self._tell(news)
                continue
            for unit in self._units.values():
                if str(unit.life) == news.life:
                    unit.condemned = news.reason

    def _close_links(self) -> None:
        self._links.close()
        if self._abroad is not None:
            self._abroad.close(self._fatal or "it was stopped")
