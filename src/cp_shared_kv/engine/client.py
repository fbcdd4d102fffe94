"""The engine as the server process reaches it: requests out, tokens and figures in, over zmq.

Here sits the router: a request goes to a prefill group and a decode worker, and to others if one
of them is lost before the first token has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from functools import partial

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from cp_shared_kv.engine.api import (
    EngineDescription,
    EngineRefusal,
    EngineStats,
    GenerateRequest,
    Outcome,
    PoolPages,
    TokenChunk,
    UnitState,
)
from cp_shared_kv.engine.background import beside
from cp_shared_kv.engine.client_room import ClientRoom, GoesElsewhere, Lost
from cp_shared_kv.engine.codecs import FROM_SERVER, TO_SERVER, FromServer, FromSupervisor
from cp_shared_kv.engine.figures import Figures
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    Admitted,
    Cancel,
    Checked,
    DecodeStats,
    Flushed,
    Paired,
    PrefillStats,
    ProcessDown,
    Registered,
    RoomRefused,
    Submit,
    Tokens,
    ToldPageMap,
)
from cp_shared_kv.engine.off_host import OffHostDoor
from cp_shared_kv.engine.presence import Presence
from cp_shared_kv.engine.recent_prompts import RecentPrompts
from cp_shared_kv.engine.room_answers import token_chunks
from cp_shared_kv.engine.router import PageKeys, Route, Router
from cp_shared_kv.engine.sampling.wire_params import wire_params
from cp_shared_kv.engine.self_check import broken
from cp_shared_kv.engine.unit_states import unit_states
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.memory.page_keys import page_keys
from cp_shared_kv.transfer.codec import pack_int64

PING_SECONDS = 1.0
HOLD_SECONDS = 60.0
"""How long a request may wait for a lost process to come back."""
RETRY_SECONDS = 0.05
MOST_LOSSES = 2
"""So often a request that was admitted may begin again. Whose third process is lost under it may
be what kills them."""
OTHERS_SECONDS = 5.0
"""How long a start waits for the other pairs when one stands."""

logger = logging.getLogger("cp_shared_kv")


class ClusterClient:
    """Implements `server.engine_client.EngineClient` for the processes of one run.

    Lives in one event loop. `start` before anything else, `close` at the end. Processes connect to
    `address`; those of other hosts where `open_off_host` lets them, if it is given.
    """

    def __init__(
        self,
        address: str,
        description: EngineDescription,
        *,
        open_off_host: Callable[[zmq.asyncio.Socket], OffHostDoor] | None = None,
    ) -> None:
        self._description = description
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self.off_host_door = None if open_off_host is None else open_off_host(self._socket)
        self._router = Router(
            description.router_policy,
            description.page_size,
            group_pages=description.logical_pages,
            decode_pages=description.decode_tokens // description.page_size,
        )
        self._rooms: dict[int, ClientRoom] = {}
        self._open: dict[str, tuple[int, Route]] = {}
        """Requests that can be aborted: room and route."""
        self._presence = Presence(time.monotonic())
        self._lost: set[Life] = set()
        self._why_lost: dict[str, str] = {}
        """Units that are down, and why."""
        self._changed = asyncio.Condition()
        self._problems: dict[Life, list[str]] = {}
        self._figures = Figures(description.page_size, self._send)
        self._recent = RecentPrompts()
        self._restarts: Counter[str] = Counter()
        self._outcomes: Counter[Outcome] = Counter(
            {"finished": 0, "aborted": 0, "failed": 0, "refused": 0}
        )
        self.tasks: list[asyncio.Task[None]] = []
        """What `start` has begun, to be watched: without them nothing is heard any more."""

    async def start(self) -> None:
        """Wait until every prefill group can send to every decode worker; once some pair stands,
        for the others only a while: a server that was started again serves by those there are."""
        self.tasks += [asyncio.create_task(self._receive()), asyncio.create_task(self._ping())]
        await beside(self.tasks, self._all_paired())

    async def _all_paired(self) -> None:
        wanted = self._description.prefill_groups * self._description.decode_workers
        async with self._changed:
            await self._changed.wait_for(self._known)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OTHERS_SECONDS):
                    await self._changed.wait_for(lambda: len(self._known()) >= wanted)

    async def close(self) -> None:
        """Stop listening. Open requests get no more tokens."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self._socket.close()
        if self.off_host_door is not None:
            self.off_host_door.close()

    async def describe(self) -> EngineDescription:
        """What does not change during the engine's life."""
        return self._description

    # Requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Output tokens as they come; see the protocol for what it raises."""
        params = wire_params(request.sampling)
        tokens = np.asarray(request.prompt_token_ids, dtype=np.int64)
        keys = page_keys(tokens, self._description.page_size)
        give_up_seconds = time.monotonic() + HOLD_SECONDS
        losses = 0
        while True:
            try:
                route = await self._route(keys, len(tokens))
            except EngineRefusal:
                self._open.pop(request.request_id, None)  # of the try before
                raise
            number = secrets.randbits(62)  # a new one each time: late words on the last go nowhere
            room = ClientRoom(route)
            self._rooms[number] = room
            self._open[request.request_id] = number, route
            self._router.book(
                number, route, keys, prompt_tokens=len(tokens), max_tokens=request.max_tokens
            )
            submit = Submit(
                room=number,
                decode=str(route.decode),
                token_ids=pack_int64(tokens),
                max_tokens=request.max_tokens,
                sampling=params,
            )
            try:
                await self._submit(route.group, submit)
                chunks = token_chunks(room, self._outcomes, partial(self._router.prefilled, number))
                async for chunk in chunks:
                    if chunk.finish_reason is not None:
                        self._open.pop(request.request_id, None)
                    yield chunk
                return
            except GoesElsewhere as why:
                losses += room.admitted
                if losses > MOST_LOSSES:
                    self._open.pop(request.request_id, None)
                    self._outcomes["failed"] += 1
                    raise EngineRefusal(
                        f"lost {losses} times on its way, the last time because {why}",
                        kind="failed",
                    ) from None
                if time.monotonic() > give_up_seconds:
                    self._open.pop(request.request_id, None)
                    raise EngineRefusal(str(why), kind="unavailable") from None
                logger.warning("request %s is sent elsewhere: %s", request.request_id, why)
                await self._cancel(number, route)
                await asyncio.sleep(RETRY_SECONDS)
            except EngineRefusal:
                self._open.pop(request.request_id, None)
                raise
            finally:
                # A caller that stops early still has to name the request to `abort`.
                if self._rooms.pop(number, None) is not None:
                    self._router.ended(number)

    async def _route(self, keys: PageKeys, prompt_tokens: int) -> Route:
        """The best pair; waits for one to come back if none stands."""
        silent = self._silence()
        if silent is not None:
            raise EngineRefusal(silent, kind="unavailable")
        try:
            async with asyncio.timeout(HOLD_SECONDS), self._changed:
                while True:
                    route = self._router.choose(keys, prompt_tokens, self._answering())
                    if route is not None:
                        return route
                    await self._changed.wait()
        except TimeoutError:
            raise EngineRefusal(self.healthy()[1], kind="unavailable") from None

    async def _submit(self, group: Life, submit: Submit) -> None:
        try:
            await self._send(group, submit)
        except EngineRefusal as refusal:
            if refusal.kind != "unavailable":
                raise
            raise GoesElsewhere(refusal.reason) from refusal  # it has just gone

    async def abort(self, request_id: str, *, finished: bool = False) -> None:
        """Stop a request and free its pages; unknown ones are no error."""
        number, route = self._open.pop(request_id, (0, None))
        if route is None:
            return
        self._outcomes["finished" if finished else "aborted"] += 1
        if self._rooms.pop(number, None) is not None:
            self._router.ended(number)
        await self._cancel(number, route)

    async def _cancel(self, number: int, route: Route) -> None:
        for life in (route.group, route.decode):
            if life in self._presence.lives:
                with contextlib.suppress(EngineRefusal):  # it has just gone, and the room with it
                    await self._send(life, Cancel(room=number))

    # Figures ----------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """Figures of this moment, of every process that answers."""
        groups, workers = await self._figures.gather(self._presence.lives)
        self._recent.observe(groups, time.monotonic())
        recent_prompt_tokens, recent_cached_tokens = self._recent.tokens()
        return EngineStats(
            prefill=groups,
            decode=workers,
            requests_total=dict(self._outcomes),
            restarts_total=dict(self._restarts),
            recent_prompt_tokens=recent_prompt_tokens,
            recent_cached_tokens=recent_cached_tokens,
        )

    async def page_maps(self, most_bins: int) -> list[PoolPages]:
        """Pages of every pool whose owner answers, by owner, range and state."""
        return await self._figures.page_maps(self._presence.lives, most_bins)

    def units(self) -> list[UnitState]:
        """How each prefill group and decode worker is."""
        silent_seconds = self._presence.silent_seconds(time.monotonic())
        return unit_states(silent_seconds, self._problems, self._lost, self._why_lost)

    async def flush_cache(self) -> int:
        """Drop every cached prefix that no request uses; returns how many logical pages."""
        return await self._figures.flush(
            [life for life in self._presence.lives if life.role == "prefill"]
        )

    async def check_invariants(self) -> dict[str, list[str]]:
        """Have every process check its books: what does not add up, by unit."""
        told = await self._figures.check(self._presence.lives)
        return told | {"router": broken([self._router.check_invariants])}

    def healthy(self) -> tuple[bool, str]:
        """Whether some pair stands that has answered lately, and every process's books balance."""
        for life, problems in self._problems.items():
            if problems:
                return False, f"{life.unit}: {problems[0]}"
        silent = self._silence()
        if silent is not None:
            return False, silent
        if self._answering():
            return True, "ok"
        if self._why_lost:
            return False, "; ".join(
                f"{unit} is starting again: {why}" for unit, why in sorted(self._why_lost.items())
            )
        return False, "the engine is starting"

    def _silence(self) -> str | None:
        return self._presence.silence(self._router.pairs, time.monotonic())

    def _known(self) -> list[Route]:
        return self._presence.known(self._router.pairs)

    def _answering(self) -> list[Route]:
        return self._presence.answering(self._router.pairs)

    # Links ------------------------------------------------------------------------------------

    async def on_news(self, news: FromSupervisor) -> None:
        """The supervisor: a process is gone. Others learn of their end by themselves."""
        if not isinstance(news, ProcessDown):
            return
        life = Life.parse(news.life)
        if life.role == "server":
            return
        if life not in self._lost:
            self._restarts[life.unit] += not news.final
        self._lost.add(life)
        if news.final:
            self._why_lost.pop(life.unit, None)
        else:
            self._why_lost[life.unit] = news.reason
        self._presence.lost(life)
        self._problems.pop(life, None)
        self._router.lost(life)
        self._figures.lost(life)
        for room in self._rooms.values():
            # What was admitted may have all its pages at decode: decode tells how it ended.
            if life == room.route.decode or (life == room.route.group and not room.admitted):
                room.inbox.put_nowait(Lost(news.reason))
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _send(self, to: Life, message: FromServer) -> None:
        try:
            await self._socket.send_multipart([to.identity, FROM_SERVER.encode(message)])
        except zmq.ZMQError as error:
            raise EngineRefusal(f"{to.unit} is not connected", kind="unavailable") from error
        except ProtocolError as error:
            raise EngineRefusal(str(error), kind="too_long") from error

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                sender = Life.parse(frames[0])
                await self._take(sender, TO_SERVER.decode(frames[-1]))
            except ProtocolError as error:
                logger.error("message refused: %s", error)

    async def _take(self, sender: Life, message: msgspec.Struct) -> None:
        if sender in self._lost:
            return
        if sender.role == "server":
            raise ProtocolError("a server speaks to a server", value=str(sender))
        if self._presence.heard(sender, time.monotonic()):
            await self._notify()  # requests may wait for it to answer again
        match message:
            case Registered():
                self._why_lost.pop(sender.unit, None)
                await self._notify()
            case Paired():
                decode = Life.parse(message.decode)
                if decode not in self._lost:
                    self._router.paired(sender, decode)
                await self._notify()
            case Tokens() | Admitted() | RoomRefused():
                self._to_room(sender, message)
            case Checked(ticket=0):
                self._problems[sender] = message.problems
            case PrefillStats() | DecodeStats() | ToldPageMap() | Flushed() | Checked():
                self._figures.take(sender, message)
            case _:
                pass

    def _to_room(self, sender: Life, message: Tokens | Admitted | RoomRefused) -> None:
        room = self._rooms.get(message.room)
        if room is None:
            return
        if sender not in (room.route.group, room.route.decode):
            raise ProtocolError("a word on another's request", value=str(sender))
        room.admitted |= isinstance(message, Admitted)
        room.inbox.put_nowait(message)

    async def _ping(self) -> None:
        while True:
            self._presence.asked(time.monotonic())
            with contextlib.suppress(EngineRefusal):
                await self.stats()
            await asyncio.sleep(PING_SECONDS)
