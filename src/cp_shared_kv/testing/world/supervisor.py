"""Starts the units of a world, strikes them, buries them and tells the others.

What engine/supervisor.py promises: the word that a life is over follows the end of its last
process, and comes before the word on the next life.
"""

from __future__ import annotations

from itertools import count
from typing import Protocol

from cp_shared_kv.engine.codecs import FROM_SUPERVISOR
from cp_shared_kv.engine.figures import SILENCE_SECONDS
from cp_shared_kv.engine.lives import Life, first_lives
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp
from cp_shared_kv.testing.world.decode import DecodeProcess
from cp_shared_kv.testing.world.ends import World
from cp_shared_kv.testing.world.network import Channel
from cp_shared_kv.testing.world.plan import Strike
from cp_shared_kv.testing.world.prefill import PrefillUnit
from cp_shared_kv.testing.world.process import Process
from cp_shared_kv.testing.world.server import ServerProcess

Unit = PrefillUnit | DecodeProcess | ServerProcess
LOAD_SECONDS = 0.3
NOTICE_SECONDS = 0.2
REAP_SECONDS = 0.05
PAUSE_SECONDS = 0.5


class SupervisedWorld(World, Protocol):
    """What the supervisor tells its world."""

    def struck(self, life: Life, reason: str) -> None:
        """A process of that life has ended."""
        ...

    def buried(self, life: Life) -> None:
        """All processes of a life were reaped."""
        ...


class Supervisor:
    """The units by name; None while one is down."""

    def __init__(self, world: SupervisedWorld) -> None:
        self._world = world
        shape = world.plan.shape
        self._first_lives = first_lives(shape.groups, shape.workers, server=True)
        self.units: dict[str, Unit] = {}
        self.long_silence = False
        """Some process was stopped for so long that others take it for gone."""
        self._news: dict[str, Channel] = {}
        self._epochs = count(100)
        self._reachable: set[Life] = set()
        self._ending: set[Life] = set()
        self._process = Process(world, Life("server", 9999, 1), "supervisor")

    @property
    def unit_names(self) -> list[str]:
        """All units, also those that are down."""
        return [life.unit for life in self._first_lives]

    def start(self) -> None:
        """Start every unit."""
        for life in self._first_lives:
            self._spawn(life)
        for strike in self._world.plan.strikes:
            self._world.clock.after(strike.at_seconds, lambda s=strike: self._strike(s))

    def ended(self, process: Process, reason: str) -> None:
        """A process is gone, by a signal or because it could not go on."""
        self._world.trace.add(process.name, "ends:", reason)
        self._world.seen[f"killed: {process.life.role}"] += 1
        self._world.struck(process.life, reason)
        process.die()
        if process.life in self._ending:
            return
        self._ending.add(process.life)
        unit = self.units[process.life.unit]
        weather, clock = self._world.weather, self._world.clock
        clock.after(weather.short_seconds(NOTICE_SECONDS), lambda: self._kill(unit, reason))

    def _spawn(self, life: Life) -> None:
        world = self._world
        epoch = next(self._epochs)
        unit: Unit
        match life.role:
            case "prefill":
                unit = PrefillUnit(world, life, epoch)
            case "decode":
                unit = DecodeProcess(world, life, epoch)
            case "server":
                unit = ServerProcess(world, life)
        self.units[life.unit] = unit
        world.trace.add(str(life), "starts")
        on_news = unit.controller.on_news if isinstance(unit, PrefillUnit) else unit.on_news
        self._news[life.unit] = Channel(
            world, self._process, unit.main, lambda data: on_news(FROM_SUPERVISOR.decode(data))
        )
        for other in sorted(self._reachable):
            self._tell(life.unit, ProcessUp(life=str(other), address=str(other)))
        unit.main.begin(world.weather.short_seconds(LOAD_SECONDS), lambda: self._loaded(unit))

    def _loaded(self, unit: Unit) -> None:
        life = unit.life
        if life in self._ending:
            return
        self._reachable.add(life)
        for other in self.units:
            self._tell(other, ProcessUp(life=str(life), address=str(life)))

    def _strike(self, strike: Strike) -> None:
        unit = self.units.get(strike.unit)
        if unit is None or unit.life in self._ending:
            return
        process = unit.processes[int(strike.choice * len(unit.processes))]
        if strike.stopped_seconds is None:
            self.ended(process, f"{process.name} was killed by SIGKILL")
        elif not process.stopped:
            self._stop(process, strike.stopped_seconds)

    def _stop(self, process: Process, seconds: float) -> None:
        world = self._world
        world.trace.add(process.name, f"is stopped for {seconds:.3f} s")
        self.long_silence |= min(seconds, world.plan.watchdog_seconds) >= SILENCE_SECONDS
        world.seen["stopped"] += 1
        process.stop()

        def resume() -> None:
            if process.alive:
                world.trace.add(process.name, "goes on")
                process.resume()

        def hung() -> None:
            if process.alive and process.stopped:
                world.seen["hung"] += 1
                self.ended(process, f"{process.name} gave no sign of life")

        if seconds < world.plan.watchdog_seconds:
            world.clock.after(seconds, resume)
        else:
            world.clock.after(world.plan.watchdog_seconds, hung)

    def _kill(self, unit: Unit, reason: str) -> None:
        for process in unit.processes:
            process.die()
        self._reachable.discard(unit.life)
        world = self._world
        world.clock.after(
            world.weather.short_seconds(REAP_SECONDS), lambda: self._reaped(unit, reason)
        )

    def _reaped(self, unit: Unit, reason: str) -> None:
        life, world = unit.life, self._world
        world.trace.add(str(life), "is reaped")
        world.buried(life)
        del self.units[life.unit], self._news[life.unit]
        for other in self.units:
            self._tell(other, ProcessDown(life=str(life), reason=reason))
        world.clock.after(
            world.weather.short_seconds(PAUSE_SECONDS), lambda: self._spawn(life.next())
        )

    def _tell(self, unit: str, news: ProcessUp | ProcessDown) -> None:
        self._news[unit].send(news)
