"""The engine as the server process reaches it: requests out, tokens and figures in.

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
from cp_shared_kv.engine.client_links import ClientLinks
from cp_shared_kv.engine.client_room import ClientRoom, GoesElsewhere, Lost
from cp_shared_kv.engine.codecs import FromSupervisor
from cp_shared_kv.engine.figures import Figures
from cp_shared_kv.engine.first_words import FirstWord, FirstWords
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    Admitted,
    Cancel,
    Checked,
    DecodeStats,
    Flushed,
    Paired,
    PrefillStats,
    ProcessUp,
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
from cp_shared_kv.engine.roster import Roster
from cp_shared_kv.engine.router import PageKeys, Route, Router
from cp_shared_kv.engine.sampling.wire_params import wire_params
from cp_shared_kv.engine.self_check import broken
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
        self._links = ClientLinks(address, open_off_host)
        self.off_host_door = self._links.off_host_door
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
        self._roster = Roster(self._presence, self._router)
        self._first_words = FirstWords()
        self._figures = Figures(description.page_size, self._links.send)
        self._recent = RecentPrompts()
        self._outcomes: Counter[Outcome] = Counter(
            {"finished": 0, "aborted": 0, "failed": 0, "refused": 0}
        )
        self.tasks: list[asyncio.Task[None]] = []
        """What `start` has begun, to be watched: without them nothing is heard any more."""

    async def start(self) -> None:
        """Wait until every prefill group can send to every decode worker; once some pair stands,
        for the others only a while: a server that was started again serves by those there are."""
        self.tasks += [
            asyncio.create_task(self._links.receive(self._take)),
            asyncio.create_task(self._ping()),
        ]
        await beside(self.tasks, self._all_paired())

    async def _all_paired(self) -> None:
        wanted = self._description.prefill_groups * self._description.decode_workers
        await self._roster.until(self._roster.known)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OTHERS_SECONDS):
                await self._roster.until(lambda: len(self._roster.known()) >= wanted)

    async def close(self) -> None:
        """Stop listening. Open requests get no more tokens."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self._links.close()

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
        silent = self._roster.silence(time.monotonic())
        if silent is not None:
            raise EngineRefusal(silent, kind="unavailable")

        def best() -> Route | None:
            return self._router.choose(keys, prompt_tokens, self._roster.answering())

        try:
            async with asyncio.timeout(HOLD_SECONDS):
                return await self._roster.until(best)
        except TimeoutError:
            raise EngineRefusal(self.healthy()[1], kind="unavailable") from None

    async def _submit(self, group: Life, submit: Submit) -> None:
        try:
            await self._links.send(group, submit)
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
                    await self._links.send(life, Cancel(room=number))

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
            restarts_total=dict(self._roster.restarts),
            recent_prompt_tokens=recent_prompt_tokens,
            recent_cached_tokens=recent_cached_tokens,
        )

    async def page_maps(self, most_bins: int) -> list[PoolPages]:
        """Pages of every pool whose owner answers, by owner, range and state."""
        return await self._figures.page_maps(self._presence.lives, most_bins)

    def units(self) -> list[UnitState]:
        """How each prefill group and decode worker is."""
        return self._roster.units(time.monotonic())

    async def flush_cache(self) -> int:
        """Drop every cached prefix that no request uses, in prefill and in decode; returns how many
        logical pages of prefill groups."""
        return await self._figures.flush(self._presence.lives)

    async def check_invariants(self) -> dict[str, list[str]]:
        """Have every process check its books: what does not add up, by unit."""
        told = await self._figures.check(self._presence.lives)
        return told | {"router": broken([self._router.check_invariants])}

    def healthy(self) -> tuple[bool, str]:
        """Whether some pair stands that has answered lately, and every process's books balance."""
        return self._roster.healthy(time.monotonic())

    # News -------------------------------------------------------------------------------------

    async def on_news(self, news: FromSupervisor) -> None:
        """The supervisor: a process is there, or gone. Others learn of their end by themselves."""
        life = Life.parse(news.life)
        if life.role == "server":
            return
        if isinstance(news, ProcessUp):
            self._roster.announced(life)
            for word in self._first_words.take(life):
                await self._take(life, word)
            return
        self._roster.lost(life, news.reason, final=news.final)
        self._figures.lost(life)
        for room in self._rooms.values():
            # What was admitted may have all its pages at decode: decode tells how it ended.
            if life == room.route.decode or (life == room.route.group and not room.admitted):
                room.inbox.put_nowait(Lost(news.reason))
        await self._roster.changed()

    async def _take(self, sender: Life, message: msgspec.Struct) -> None:
        if self._roster.is_lost(sender):
            return
        if sender.role == "server":
            raise ProtocolError("a server speaks to a server", value=str(sender))
        if not self._roster.is_announced(sender):
            if not isinstance(message, FirstWord):
                raise ProtocolError("a word of a process nobody announced", value=str(sender))
            self._first_words.keep(sender, message)
            return
        await self._roster.heard(sender, time.monotonic())
        match message:
            case Registered():
                await self._roster.registered(sender)
            case Paired():
                await self._roster.paired(sender, Life.parse(message.decode))
            case Tokens() | Admitted() | RoomRefused():
                self._to_room(sender, message)
            case Checked(ticket=0):
                self._roster.checked(sender, message.problems)
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
