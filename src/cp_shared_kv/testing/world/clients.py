"""Who asks, what each is owed, and what has become of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from cp_shared_kv.engine.api import TokenChunk
from cp_shared_kv.engine.messages import Admitted, Submit
from cp_shared_kv.testing.world.answers import expected_answer
from cp_shared_kv.testing.world.plan import PlannedRequest
from cp_shared_kv.testing.world.process import Host
from cp_shared_kv.testing.world.trace import BrokenPromise


class ClientHost(Host, Protocol):
    """What clients need of their world."""

    def is_gone(self, life: str) -> bool:
        """Whether some process of a life has ended."""
        ...

    def refused(self, one: Client) -> None:
        """A client gets no (more) output."""
        ...


class Doorkeeper(Protocol):
    """A server as its clients see it."""

    def connection(self, one: Client) -> None:
        """A client waits to be accepted."""
        ...

    def leave(self, one: Client) -> None:
        """A client goes away, or its deadline passes."""
        ...


@dataclass(eq=False)
class Client:
    """One request as its client sees it."""

    world: ClientHost
    number: int
    planned: PlannedRequest
    rooms: list[int] = field(default_factory=list[int])
    """One for each try."""
    route: frozenset[str] = frozenset()
    """The two lives of the last try."""
    admitted: bool = False
    """Prefill has said that it computes the last try."""
    tokens: list[int] = field(default_factory=list[int])
    answer: str | None = None
    """How it ended: stop, length, enough, left, or the kind of a refusal."""
    reason: str = ""
    harmed_by: list[str] = field(default_factory=list[str])
    """What happened to its last try that may cost it its answer."""

    @property
    def over(self) -> bool:
        """Whether it has its answer."""
        return self.answer is not None

    @property
    def has_enough(self) -> bool:
        """Whether it wants no further tokens."""
        enough = self.planned.enough_tokens
        return enough is not None and len(self.tokens) >= enough

    def take(self, chunk: TokenChunk) -> None:
        """Output has come."""
        self._check_open("tokens")
        self.tokens += chunk.token_ids
        planned = self.planned
        output, finish = expected_answer(planned.prompt, planned.max_tokens, planned.ignore_eos)
        if self.tokens != output[: len(self.tokens)]:
            raise BrokenPromise(f"request {self.number} was given {self.tokens}, not {output}")
        if chunk.finish_reason is not None:
            self._end(chunk.finish_reason)
            self._at_the_limit()
            if (self.tokens, chunk.finish_reason) != (output, finish):
                raise BrokenPromise(
                    f"request {self.number} ended by {chunk.finish_reason} after {self.tokens}; "
                    f"right is {finish} after {output}"
                )
        elif self.has_enough:
            self._end("enough")

    def refused(self, kind: str, reason: str) -> None:
        """It gets no (more) output."""
        self._check_open("a refusal")
        if not reason:
            raise BrokenPromise(f"request {self.number} was refused without a reason")
        self._end(kind, reason)
        self.world.refused(self)

    def gives_up(self) -> None:
        """It goes away."""
        self._end("left")

    def _end(self, answer: str, reason: str = "") -> None:
        self.answer, self.reason = answer, reason
        self.world.seen[f"answered: {answer}"] += 1
        self.world.trace.add(f"client {self.number}", f"is answered: {answer}", reason)

    def _at_the_limit(self) -> None:
        shape, tokens = self.world.plan.shape, len(self.planned.prompt)
        self.world.seen["longest prompt"] += tokens == shape.longest_prompt_tokens
        self.world.seen["largest reservation"] += (
            tokens + self.planned.max_tokens == shape.most_tokens
        )

    def _check_open(self, what: str) -> None:
        if self.over:
            raise BrokenPromise(
                f"request {self.number} was given {what} after its end ({self.answer})"
            )


class Clients:
    """All clients of a run, by number, and by the rooms of their tries."""

    def __init__(self, world: ClientHost, requests: Sequence[PlannedRequest]) -> None:
        self._world = world
        self.all = [Client(world, i, one) for i, one in enumerate(requests)]
        self._by_room: dict[int, Client] = {}
        self._backlog: list[Client] = []
        """Those whom no server has accepted: the listening socket outlives each."""
        self._server: Doorkeeper | None = None

    def arrive(self) -> None:
        """Plan every client's coming, and going if it is impatient."""
        for one in self.all:
            self._world.clock.after(one.planned.at_seconds, lambda one=one: self._arrives(one))

    def of_room(self, room: int) -> Client:
        """Whose try a room is."""
        return self._by_room[room]

    def submitted(self, group: str, message: Submit) -> None:
        """The server sends a request on its way: a new try."""
        one = self.all[message.sampling.seed]
        self._world.seen["another try"] += bool(one.rooms)
        one.rooms.append(message.room)
        one.route = frozenset([group, message.decode])
        one.admitted = False
        one.harmed_by = [f"{life} is gone" for life in one.route if self._world.is_gone(life)]
        self._by_room[message.room] = one

    def hear(self, message: msgspec.Struct) -> None:
        """What a controller or a decode worker says to the server, as it says it."""
        if isinstance(message, Admitted):
            one = self._by_room[message.room]
            one.admitted |= one.rooms[-1] == message.room
            self._world.seen["prefix found by prefill"] += message.cached_tokens > 0

    def server_ready(self, server: Doorkeeper) -> None:
        """Who has waited for a server is accepted."""
        self._server = server
        for one in self._backlog:
            server.connection(one)

    def accepted(self, one: Client) -> bool:
        """A server gets to a client; False if it has left or was another's."""
        if one not in self._backlog:
            return False
        self._backlog.remove(one)
        return True

    def server_died(self, server: Doorkeeper) -> None:
        """New clients wait for the next one."""
        if self._server is server:
            self._server = None

    def unanswered(self) -> list[int]:
        """Who still waits."""
        return [one.number for one in self.all if not one.over]

    def _arrives(self, one: Client) -> None:
        planned = one.planned
        self._world.trace.add(
            f"client {one.number}",
            f"asks: {len(planned.prompt)} tokens, {planned.max_tokens} to generate",
        )
        self._backlog.append(one)
        if self._server is not None:
            self._server.connection(one)
        if planned.patience_seconds is not None:
            self._world.clock.after(planned.patience_seconds, lambda: self._leaves(one))

    def _leaves(self, one: Client) -> None:
        if one in self._backlog:
            self._backlog.remove(one)
            one.gives_up()
        elif self._server is not None:
            self._server.leave(one)
