"""The pages that decode sets aside for a request: all of them, or none; in order of arrival."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cp_shared_kv.errors import CapacityError
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_keys import page_keys
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.decode_session import DecodeSession
from cp_shared_kv.transfer.descriptors import stripe_destinations
from cp_shared_kv.transfer.messages import Declined, Reserve
from cp_shared_kv.transfer.reservation import Reservation

if TYPE_CHECKING:
    from cp_shared_kv.engine.decode_room import DecodeRoom, PrefillPeer


class WaitingRooms:
    """Rooms whose pages are not set aside yet. None passes another that came before it."""

    def __init__(self, pool: LogicalPool, *, epoch: int, cp_size: int) -> None:
        self._pool = pool
        self._epoch = epoch
        self._cp_size = cp_size
        self._rooms: dict[int, DecodeRoom] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rooms)

    def add(self, name: int, room: DecodeRoom) -> None:
        """A room waits, behind all others."""
        self._rooms[name] = room

    def remove(self, name: int) -> None:
        """A room waits no more."""
        del self._rooms[name]

    def answers(self) -> Iterator[tuple[DecodeRoom, Reserve | Declined]]:
        """What the first can be told, and then the next, while there is an answer: pages are free
        for it, or never will be. Those waits are over."""
        while self._rooms:
            name, room = next(iter(self._rooms.items()))
            answer: Reserve | Declined | None
            try:
                answer = reserve(self._pool, room, epoch=self._epoch, cp_size=self._cp_size)
            except CapacityError as error:
                answer = declined(room.peer, name, str(error), epoch=self._epoch)
            if answer is None:
                return
            del self._rooms[name]
            yield room, answer


def declined(peer: PrefillPeer, name: int, reason: str, *, epoch: int) -> Declined:
    """The answer to an offer that comes to nothing."""
    return Declined(epoch=epoch, peer_epoch=peer.epoch, room=name, reason=reason)


def reserve(pool: LogicalPool, room: DecodeRoom, *, epoch: int, cp_size: int) -> Reserve | None:
    """Set pages aside for the prompt and its output, and open the room's session.

    Returns what to tell prefill: the destinations of the pages that decode does not hold yet. None,
    with nothing changed, while too few are free. CapacityError if they will never be enough.
    """
    name, tokens = room.offer.room, room.prompt_tokens + room.offer.max_tokens
    prompt_pages = -(-room.prompt_tokens // pool.page_size)
    admission = pool.admit(
        name,
        page_keys(room.offer.tokens(), pool.page_size),
        -(-tokens // pool.page_size),
        arrange=partial(arrange_for_senders, cp_size, prompt_pages),
    )
    if admission is None:
        return None
    room.logical_pages = admission.logical_pages
    # What decode holds already is not asked for. It does not share its pool, so its logical
    # pages are its physical ones.
    held = admission.cached_pages
    physical_pages = PhysicalPages(admission.logical_pages[held:prompt_pages])
    room.session = DecodeSession(
        room=name,
        epoch=epoch,
        peer_epoch=room.peer.epoch,
        cp_size=cp_size,
        reservation=Reservation(first_position=held, physical_pages=physical_pages),
    )
    return Reserve(
        epoch=epoch,
        peer_epoch=room.peer.epoch,
        room=name,
        first_position=held,
        physical_pages=pack_int64(physical_pages),
    )


def arrange_for_senders(
    cp_size: int, prompt_pages: int, drawn: LogicalPages, first_position: int
) -> LogicalPages:
    """The drawn pages in the order of positions: what prefill will send so that each owner's pages
    lie together, then the rest."""
    sent = max(0, prompt_pages - first_position)
    striped = stripe_destinations(PhysicalPages(drawn[:sent]), first_position, cp_size)
    return LogicalPages(np.concatenate([striped, drawn[sent:]]))
