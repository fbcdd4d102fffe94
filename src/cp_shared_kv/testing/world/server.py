"""The server: the real client of the engine, with its router and retries, on virtual time.

Of `engine/client.py` three things are replaced while it runs: the socket, the clock and the source
of room numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import aclosing, contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import zmq
import zmq.asyncio

from cp_shared_kv.engine import client as client_module
from cp_shared_kv.engine.api import EngineDescription, EngineRefusal, GenerateRequest, Sampling
from cp_shared_kv.engine.client import ClusterClient
from cp_shared_kv.engine.codecs import FROM_SERVER
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp, Submit
from cp_shared_kv.server.access_log import RequestRecord
from cp_shared_kv.server.generation import RequestMeter, generate
from cp_shared_kv.server.metrics import ServerMetrics
from cp_shared_kv.testing.world.clients import Client
from cp_shared_kv.testing.world.clock import Clock
from cp_shared_kv.testing.world.ends import ServerEnd, World
from cp_shared_kv.testing.world.event_loop import VirtualLoop
from cp_shared_kv.testing.world.network import Channel
from cp_shared_kv.testing.world.process import Process


class SimulatedSocket:
    """The server's ROUTER: who is connected, and what has come."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._arrived: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.peers: dict[bytes, Channel] = {}
        self.linger = self.sndhwm = self.rcvhwm = -1

    def setsockopt(self, option: int, value: int) -> None:
        """It refuses to send to whom it does not know, as the client asks for."""
        assert (option, value) == (zmq.ROUTER_MANDATORY, 1)

    def bind(self, address: str) -> None:
        """Its address is the process."""

    def close(self) -> None:
        """Ends with the process."""

    def put(self, frames: list[bytes]) -> None:
        """A message has come."""
        self._arrived.put_nowait(frames)

    async def send_multipart(self, frames: list[bytes]) -> None:
        """ZMQError for a receiver that is not connected, as with ROUTER_MANDATORY."""
        channel = self.peers.get(frames[0])
        if channel is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        message = FROM_SERVER.decode(frames[1])
        if isinstance(message, Submit):
            self._world.clients.submitted(frames[0].decode(), message)
        channel.send(message)

    async def recv_multipart(self) -> list[bytes]:
        """The next message."""
        return await self._arrived.get()


class ServerProcess(ServerEnd):
    """One life of the server."""

    def __init__(self, world: World, life: Life) -> None:
        super().__init__(world, life, str(life))
        self.world = world
        self.ready = False
        self._loop = VirtualLoop(self, world.clock)
        self._socket = SimulatedSocket(world)
        self._connecting: dict[Life, Channel] = {}
        self._serving: dict[Client, asyncio.Task[None]] = {}
        with patch.object(zmq.asyncio.Context, "instance", lambda: _Context(self._socket)):
            self.client = ClusterClient("", _description(world))
        self.take(lambda: self._run(self._start()))

    @property
    def main(self) -> Process:
        """The process that takes the supervisor's news."""
        return self

    @property
    def processes(self) -> list[Process]:
        """All of the unit."""
        return [self]

    def on_news(self, news: ProcessUp | ProcessDown) -> None:
        """The supervisor on all others."""
        self._run(self.client.on_news(news))

    def connect(self, process: Process, channel: Channel) -> None:
        """A process has a link to this server; it is known by its first message."""
        self._connecting[process.life] = channel

    def disconnected(self, life: Life) -> None:
        """The kernel says that the other end of a link is gone."""
        self._connecting.pop(life, None)
        self._socket.peers.pop(life.identity, None)

    def hear(self, sender: Life, data: bytes) -> None:
        """A message of a controller or a decode worker."""
        channel = self._connecting.pop(sender, None)
        if channel is not None:
            self._socket.peers[sender.identity] = channel
        self._socket.put([sender.identity, data])
        self._loop.run_ready()

    def connection(self, one: Client) -> None:
        """A client waits to be accepted."""
        self.take(lambda: self._accept(one))

    def leave(self, one: Client) -> None:
        """A client goes away, or its deadline passes."""
        self.take(lambda: self._leave(one))

    def die(self) -> None:
        """Its clients' connections break."""
        super().die()
        for one in list(self._serving):
            one.refused("connection", "the connection to the server broke")
        self.close()

    def close(self) -> None:
        """Its tasks end."""
        self._loop.close()

    def check_books(self) -> None:
        """The router's loads are those of the open requests."""
        self.client._router.check_invariants()  # pyright: ignore[reportPrivateUsage]

    def unfinished(self) -> list[str]:
        """What the client of the engine has not forgotten, or has not begun."""
        client = self.client
        open_ = len(client._rooms) + len(client._open)  # pyright: ignore[reportPrivateUsage]
        return [f"{open_} requests are open"] * bool(open_) + ["it waits"] * (not self.ready)

    async def _start(self) -> None:
        await self.client.start()
        self.ready = True
        self.world.clients.server_ready(self)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.create_task(work)
        self._loop.run_ready()

    def _accept(self, one: Client) -> None:
        if not self.world.clients.accepted(one):
            return
        self._serving[one] = self._loop.create_task(self._serve(one))
        self._loop.run_ready()

    async def _serve(self, one: Client) -> None:
        request = GenerateRequest(
            request_id=f"request-{one.number}",
            prompt_token_ids=one.planned.prompt,
            max_tokens=one.planned.max_tokens,
            sampling=Sampling(seed=one.number, ignore_eos=one.planned.ignore_eos),
        )
        meter = RequestMeter(RequestRecord(request.request_id), ServerMetrics())
        try:
            async with aclosing(generate(self.client, request, meter)) as chunks:
                async for chunk in chunks:
                    one.take(chunk)
                    if one.has_enough:
                        meter.finished("stop")
                        break
        except EngineRefusal as refusal:
            one.refused(refusal.kind, refusal.reason)
        finally:
            self._serving.pop(one, None)

    def _leave(self, one: Client) -> None:
        task = self._serving.get(one)
        if task is not None and not one.over:
            one.gives_up()
            task.cancel()
            self._loop.run_ready()


class _Context:
    def __init__(self, socket: SimulatedSocket) -> None:
        self._socket = socket

    def socket(self, kind: int) -> SimulatedSocket:
        assert kind == zmq.ROUTER
        return self._socket


class _VirtualTime:
    """The part of `time` that the client of the engine uses."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.now_seconds


class _RoomNumbers:
    """The part of `secrets` that the client of the engine uses."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def randbits(self, bits: int) -> int:
        assert bits <= 63
        return next(self._numbers)


@contextmanager
def on_virtual_time(clock: Clock) -> Generator[None]:
    """The client of the engine tells the time by `clock`, and numbers rooms from 1."""
    with (
        patch.object(client_module, "time", _VirtualTime(clock)),
        patch.object(client_module, "secrets", _RoomNumbers()),
    ):
        yield


def _description(world: World) -> EngineDescription:
    limits, shape = world.spec.limits, world.plan.shape
    return EngineDescription(
        model_name="none",
        version="0",
        context_length=limits.context_length,
        vocab_size=world.spec.vocab_size,
        eos_token_ids=world.spec.eos_token_ids,
        page_size=limits.page_size,
        cp_size=limits.cp_size,
        shard_policy="page_interleaved",
        kv_read="pull",
        physical_tokens_per_rank=limits.physical_tokens_per_rank,
        logical_tokens=limits.logical_tokens,
        decode_tokens=limits.decode_tokens,
        pool_bytes_per_rank=limits.pool_bytes_per_rank,
        scratch_limit_bytes=limits.scratch_limit_bytes,
        prefill_groups=shape.groups,
        decode_workers=shape.workers,
        router_policy=shape.router_policy,
        config={},
    )
