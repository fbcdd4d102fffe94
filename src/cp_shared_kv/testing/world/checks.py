"""The promises of the design, checked after each event and when all is at rest."""

from __future__ import annotations

from cp_shared_kv.errors import InvariantError, ProtocolError
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.testing.world.clients import Client
from cp_shared_kv.testing.world.decode import DecodeProcess
from cp_shared_kv.testing.world.ends import World
from cp_shared_kv.testing.world.prefill import PrefillUnit
from cp_shared_kv.testing.world.process import Process
from cp_shared_kv.testing.world.supervisor import Supervisor
from cp_shared_kv.testing.world.trace import BrokenPromise
from cp_shared_kv.testing.world.writes import Write

WELL_SECONDS = 3.0
"""A request is not turned away if all that it needs has been there for so long."""
OF_THE_DEAD = {"a greeting of a group that is gone", "a message before the handshake"}
"""What is refused of messages that arrive after the word that their sender is gone."""
BOOKS_EVERY = 4
"""Books are checked after so many of a process's events: that takes longer than the event."""


class Checks:
    """Whatever does not hold is a BrokenPromise."""

    def __init__(self, world: World, supervisor: Supervisor) -> None:
        self._world, self._supervisor = world, supervisor
        self._until_books: dict[Process, int] = {}

    # While it runs ----------------------------------------------------------------------------

    def after(self, process: Process) -> None:
        """A process has dealt with something."""
        for write in self._world.writes.all():
            self._write_is_safe(write)
        left = self._until_books.get(process, 0)
        self._until_books[process] = (left or BOOKS_EVERY) - 1
        if not left:
            self.books(process)

    def books(self, process: Process) -> None:
        """A process's books balance."""
        try:
            process.check_books()
        except InvariantError as error:
            raise BrokenPromise(f"{process.name}: {error}") from error

    def write_begins(self, write: Write) -> None:
        """A rank submits a write."""
        self._write_is_safe(write)
        if write.decode.alive:
            pages = write.destinations
            others = pages - set(write.decode.pool.pages(write.room).tolist())
            if others:
                raise BrokenPromise(
                    f"{write.rank.name} writes pages {sorted(others)} of another room"
                )

    def _write_is_safe(self, write: Write) -> None:
        """As long as it can land, both ends keep its room's pages for it."""
        if write.decode.alive and write.room not in write.decode.pool.rooms:
            raise BrokenPromise(
                f"{write.decode.name} has given the pages of room {write.room} away while a write "
                f"of {write.rank.name} can land on {sorted(write.destinations)}"
            )
        unit = self._supervisor.units.get(write.rank.life.unit)
        if not isinstance(unit, PrefillUnit) or unit.life != write.rank.life:
            return
        if unit.controller.alive and write.room not in unit.controller.pool.rooms:
            raise BrokenPromise(
                f"{unit.life} has given the pages of room {write.room} away while a write of "
                f"{write.rank.name} reads them"
            )

    def message_refused(self, process: Process, error: ProtocolError) -> None:
        """A process refuses a message. In a world of honest ones, only what a dead one left."""
        self._world.trace.add(process.name, "refuses a message:", error)
        if error.what not in OF_THE_DEAD or not self._world.plan.strikes:
            raise BrokenPromise(f"{process.name} refused a message: {error}")

    def refused(self, one: Client) -> None:
        """A client is refused: it must have been done harm, or have asked too much."""
        shape, planned = self._world.plan.shape, one.planned
        tokens = len(planned.prompt)
        too_long = (
            tokens > shape.longest_prompt_tokens or tokens + planned.max_tokens > shape.most_tokens
        )
        may = {
            "too_long": too_long,
            "overloaded": shape.max_queued is not None,
            "failed": one.admitted and bool(one.harmed_by),
            "unavailable": (one.admitted and bool(one.harmed_by))
            or (self._supervisor.long_silence and not self._someone_serves()),
            "connection": True,
        }
        killed = one.answer == "failed" and one.reason.endswith("was killed by SIGKILL")
        if killed and not one.tokens and not one.reason.startswith("lost 3 times"):
            raise BrokenPromise(f"request {one.number} had no token and has not begun again")
        if not may.get(one.answer or "", False):
            raise BrokenPromise(
                f"request {one.number} was refused without cause ({one.answer}): {one.reason}; "
                f"admitted: {one.admitted}; harm: {one.harmed_by}"
            )

    def _someone_serves(self) -> bool:
        """Whether the server and a pair have been well for a while."""
        well = {
            unit.life.role
            for unit in self._supervisor.units.values()
            if all(process.well_seconds > WELL_SECONDS for process in unit.processes)
        }
        return well == {"prefill", "decode", "server"}

    # At the end -------------------------------------------------------------------------------

    def unfinished(self) -> list[str]:
        """What is not at rest yet."""
        world = self._world
        open_: list[str] = [f"client {n} waits" for n in world.clients.unanswered()]
        open_ += [f"a write of room {w.room} by {w.rank.name}" for w in world.writes.all()]
        for name in self._supervisor.unit_names:
            unit = self._supervisor.units.get(name)
            if unit is None or not unit.main.alive:
                open_.append(f"{name} is down")
            elif any(process.stopped for process in unit.processes) or unit.main.busy:
                open_.append(f"{name} is held")
            else:
                open_ += [f"{unit.life}: {what}" for what in unit.unfinished()]
                if isinstance(unit, PrefillUnit):
                    open_ += self._reaches_others_than_live(unit)
        return open_

    def at_rest(self) -> None:
        """Nothing is lost, and nothing is locked."""
        for unit in self._supervisor.units.values():
            for process in unit.processes:
                self.books(process)
            if isinstance(unit, PrefillUnit):
                self._pool_is_free(str(unit.life), unit.controller.pool)
            elif isinstance(unit, DecodeProcess):
                self._pool_is_free(str(unit.life), unit.pool)

    def _reaches_others_than_live(self, unit: PrefillUnit) -> list[str]:
        # A dead one stays mapped while a write to it is under way, and is let go afterwards.
        lives = sorted(map(str, self._world.decode_lives))
        return [
            f"{rank.name} holds {rank.transport.peers} mapped; {lives} live"
            for rank in unit.ranks
            if rank.transport.peers != lives
        ]

    def _pool_is_free(self, name: str, pool: LogicalPool) -> None:
        if pool.locked_pages:
            raise BrokenPromise(f"{name} is at rest with {pool.locked_pages} pages locked")
        self._world.seen["pages evicted"] += pool.evicted_pages_total
        pool.clear()
        if pool.available_pages != pool.total_pages:
            raise BrokenPromise(
                f"{name} has {pool.available_pages} of its {pool.total_pages} pages, all empty"
            )
