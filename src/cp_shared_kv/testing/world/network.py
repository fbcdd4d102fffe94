"""Links between processes: reliable and in order, or, where messages are repeated, neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.testing.world.process import Host, Process


@dataclass(eq=False)
class _Parcel:
    message: msgspec.Struct
    data: bytes
    lost: bool = False


class Channel:
    """One direction of a link. `receive` gets the bytes of each message where they are for.

    A reliable channel only delays, as zmq does. One that is not may lose, double and reorder:
    between ranks and decode, whose messages the protocol repeats until they are acknowledged.
    """

    def __init__(
        self,
        world: Host,
        sender: Process,
        receiver: Process,
        receive: Callable[[bytes], None],
        *,
        reliable: bool = True,
    ) -> None:
        self._world, self._sender, self._receiver = world, sender, receiver
        self._receive, self._reliable = receive, reliable
        self._last_arrival_seconds = 0.0
        self._under_way: list[_Parcel] = []
        sender.outgoing.append(self)

    def send(self, message: msgspec.Struct) -> None:
        """Put a message on its way. From a dead process nothing leaves."""
        if not self._sender.alive:
            return
        data = encode(message)
        copies = 1
        if not self._reliable:
            copies = self._world.weather.copies()
            if copies != 1:
                fate = "lost" if copies == 0 else "doubled"
                self._world.seen[f"message {fate}"] += 1
                self._world.trace.add(
                    self._sender.name, f"-> {self._receiver.name}, {fate}:", message
                )
        for _ in range(copies):
            self._dispatch(_Parcel(message, data))

    def cut(self) -> None:
        """The sender has died: of what has not arrived, an unknown part is lost."""
        rng = self._world.rng
        if self._reliable:
            lost = self._under_way[rng.randint(0, len(self._under_way)) :]
        else:
            lost = [parcel for parcel in self._under_way if rng.random() < 0.5]
        for parcel in lost:
            parcel.lost = True

    def _dispatch(self, parcel: _Parcel) -> None:
        clock = self._world.clock
        arrival = clock.now_seconds + self._world.weather.delay_seconds()
        if self._reliable or not self._world.weather.overtakes():
            arrival = self._last_arrival_seconds = max(arrival, self._last_arrival_seconds)
        else:
            self._world.seen["message overtaken"] += arrival < self._last_arrival_seconds
        self._under_way.append(parcel)
        clock.after(arrival - clock.now_seconds, lambda: self._arrive(parcel))

    def _arrive(self, parcel: _Parcel) -> None:
        self._under_way.remove(parcel)
        if not parcel.lost:
            self._receiver.take(lambda: self._read(parcel))

    def _read(self, parcel: _Parcel) -> None:
        self._world.trace.add(self._receiver.name, f"<- {self._sender.name}", parcel.message)
        self._receive(parcel.data)
