"""The world of one plan, from its first process to the rest at its end."""

from __future__ import annotations

import random
from collections import Counter

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.world.checks import Checks
from cp_shared_kv.testing.world.clients import Client, Clients
from cp_shared_kv.testing.world.clock import Clock
from cp_shared_kv.testing.world.decode import DecodeProcess
from cp_shared_kv.testing.world.plan import Plan
from cp_shared_kv.testing.world.process import Process
from cp_shared_kv.testing.world.server import ServerProcess, on_virtual_time
from cp_shared_kv.testing.world.sizes import run_spec
from cp_shared_kv.testing.world.supervisor import Supervisor
from cp_shared_kv.testing.world.trace import BrokenPromise, Trace
from cp_shared_kv.testing.world.weather import Weather
from cp_shared_kv.testing.world.writes import Write, Writes

LOOK_SECONDS = 0.5
REST_SECONDS = 45.0
"""When nothing breaks any more and nothing is stopped, everything is over by then. Less than what
a request may wait: one that waits for nothing is found."""
MAX_EVENTS = 200_000


class SimulatedWorld:
    """The engine of one plan: its processes, its links, its clients and its misfortunes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock = Clock()
        self.rng = random.Random(f"run {plan.seed}")  # noqa: S311
        self.trace = Trace(self.clock)
        self.seen: Counter[str] = Counter()
        """What has happened, how often."""
        self.weather = Weather(plan, self.clock, self.rng)
        self.spec = run_spec(plan)
        self.writes = Writes()
        self.clients = Clients(self, plan.requests)
        self.supervisor = Supervisor(self)
        self.checks = Checks(self, self.supervisor)
        self._at_rest = False

    def run(self) -> None:
        """Until nothing is left to do. BrokenPromise if something does not hold."""
        with on_virtual_time(self.clock):
            self.supervisor.start()
            self.clients.arrive()
            self.clock.after(self.plan.calm_seconds, self._look)
            while not self._at_rest:
                self.clock.step()
                if self.clock.events > MAX_EVENTS:
                    raise BrokenPromise(f"{MAX_EVENTS} events, and no end")
            self.checks.at_rest()

    def close(self) -> None:
        """End what would warn of being left behind."""
        server = self.supervisor.units.get("server-0")
        if isinstance(server, ServerProcess):
            server.close()

    # What its parts ask -----------------------------------------------------------------------

    def decode_of(self, life: Life) -> DecodeProcess | None:
        """The process of that life, while it lives."""
        unit = self.supervisor.units.get(life.unit)
        if isinstance(unit, DecodeProcess) and unit.life == life and unit.alive:
            return unit
        return None

    @property
    def decode_lives(self) -> set[Life]:
        """The decode workers that are up."""
        units = self.supervisor.units.values()
        return {unit.life for unit in units if isinstance(unit, DecodeProcess)}

    def server_of(self, life: Life) -> ServerProcess | None:
        """The process of that life, while it lives."""
        unit = self.supervisor.units.get(life.unit)
        if isinstance(unit, ServerProcess) and unit.life == life and unit.alive:
            return unit
        return None

    def is_gone(self, life: str) -> bool:
        """Whether some process of a life has ended."""
        unit = self.supervisor.units.get(Life.parse(life).unit)
        return (
            unit is None
            or str(unit.life) != life
            or not all(process.alive for process in unit.processes)
        )

    def prompt_of(self, room: int) -> tuple[int, ...]:
        """The prompt whose try a room is."""
        return self.clients.of_room(room).planned.prompt

    # What happens to it -----------------------------------------------------------------------

    def struck(self, life: Life, reason: str) -> None:
        """A process of that life has ended."""
        for one in self.clients.all:
            if not one.over and str(life) in one.route:
                one.harmed_by.append(reason)
        unit = self.supervisor.units[life.unit]
        if isinstance(unit, ServerProcess):
            self.clients.server_died(unit)
        server = self.supervisor.units.get("server-0")
        if isinstance(server, ServerProcess):
            self.clock.after(self.weather.short_seconds(0.05), lambda: server.disconnected(life))

    def ended(self, process: Process, reason: str) -> None:
        """A process ends by itself."""
        self.supervisor.ended(process, reason)

    def after(self, process: Process) -> None:
        """A process has dealt with something."""
        self.checks.after(process)

    def message_refused(self, process: Process, error: ProtocolError) -> None:
        """A process refuses what it was sent."""
        self.checks.message_refused(process, error)

    def refused(self, one: Client) -> None:
        """A client gets no (more) output."""
        self.checks.refused(one)

    def write_begins(self, write: Write) -> None:
        """A rank submits a write."""
        self.checks.write_begins(write)

    def harm(self, write: Write, how: str) -> None:
        """Something happened to a write that may cost its request the answer."""
        self.seen[how] += 1
        self.clients.of_room(write.room).harmed_by.append(how)

    def buried(self, life: Life) -> None:
        """All processes of a life were reaped. What a network holds of it may still land."""
        for write in self.writes.all():
            if write.rank.life != life:
                continue
            if self.weather.writes_take_time:
                self.clock.after(
                    self.weather.short_seconds(1.0), lambda write=write: self._last_bytes(write)
                )
            else:
                self.writes.over(write)

    def _last_bytes(self, write: Write) -> None:
        self.seen["bytes of the dead landed"] += write.land(self.rng.random())
        self.writes.over(write)

    def _look(self) -> None:
        unfinished = self.checks.unfinished()
        self._at_rest = not unfinished
        if self._at_rest:
            return
        if self.clock.now_seconds > self.plan.quiet_seconds + REST_SECONDS:
            raise BrokenPromise(f"it does not come to rest: {'; '.join(unfinished)}")
        self.clock.after(LOOK_SECONDS, self._look)
