"""The group's logical pool: what the scheduler sees of KV memory, in one object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, KeysView
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import CapacityError, InvariantError, LayoutError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.checks import check_whole_number
from cp_shared_kv.layout.pages import LogicalLocs, LogicalPages
from cp_shared_kv.memory.allocator import PageAllocator
from cp_shared_kv.memory.page_map import PageMap
from cp_shared_kv.memory.prefix_cache import KeyRows, PrefixCache, RadixNode, key_rows
from cp_shared_kv.memory.request_table import RequestTable

PageKeys = npt.NDArray[np.generic]
Arrange = Callable[[LogicalPages, int], LogicalPages]
"""Drawn pages and the position of the first in the request -> the same pages, reordered."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The pages of an admitted room by position; the KV of the first `cached_pages` is there."""

    logical_pages: LogicalPages
    cached_pages: int


@dataclass(slots=True)
class _Room:
    end: RadixNode  # the room's lock in the prefix cache
    published: KeyRows  # keys of the leading pages whose KV is in the cache
    # Published positions where the cache has another room's page, as (start, stop).
    own_copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class LogicalPool:
    """N*P logical pages, shared by the open rooms and the prefix cache.

    The life of a room: `admit` (or `fork`), any number of `extend` and `publish`, `release`.
    Each page is in one of three states, counted by a property each: available (free), cached
    (in the prefix cache, evicted when room is needed), or locked (held by a room). A call that
    raises or returns None has changed nothing, except that cached pages stay evicted which `admit`
    took before its `arrange` raised.

    `page_keys` are 1-D arrays with one opaque value of any fixed-size dtype for each full page:
    digests of live tokens (`page_keys.page_keys`) or the block ids of a trace. The unaligned
    tail of a request is a page without a key. Single-threaded, local to the prefill controller.

    Errors of all methods: InvariantError for a room that is not open (or, to admit, that is);
    LayoutError for keys or counts that make no sense; CapacityError for a room that could not
    fit an empty pool.
    """

    def __init__(self, capacity: KVCapacity, *, prefix_caching: bool = True) -> None:
        self.page_size = capacity.page_size
        self.total_pages = capacity.logical_pages
        self.prefix_caching = prefix_caching
        self.evicted_pages_total = 0
        # Evicted beyond need: a stripe of every owner. In a full pool a draw would else have to
        # take just the pages that come free, and requests would drift out of balance.
        self._spare_pages = capacity.cp_size * capacity.stripe_pages
        self._allocator = PageAllocator(capacity)
        self._cache = PrefixCache()
        self._requests = RequestTable(capacity.page_size)
        self._rooms: dict[int, _Room] = {}

    @property
    def available_pages(self) -> int:
        """Pages on the free lists."""
        return self._allocator.available_pages

    @property
    def cached_pages(self) -> int:
        """Pages of cached prefixes that no room has locked: all of them can be evicted."""
        return self._cache.evictable_pages

    @property
    def locked_pages(self) -> int:
        """Pages that an open room holds, alone or with others."""
        return self.total_pages - self.available_pages - self.cached_pages

    @property
    def rooms(self) -> KeysView[int]:
        return self._requests.rooms

    def free_pages_per_owner(self) -> npt.NDArray[np.int64]:
        """How many pages of each owner are available, i64[N]."""
        return self._allocator.free_pages_per_owner()

    def page_map(self, most_bins: int) -> PageMap:
        """Which pages are free, cached or locked now, by owner and range of physical pages.

        At most `most_bins` ranges an owner; LayoutError below one. Takes time in proportion to the
        pool.
        """
        return PageMap.of(
            free=self._allocator.free_by_place(),
            cached=self._allocator.by_place(self._cache.unlocked_pages()),
            most_bins=most_bins,
        )

    def match(self, page_keys: PageKeys) -> int:
        """How many leading pages of these keys are cached now. Nothing changes."""
        return self._cache.match(self._keys(page_keys)).page_count

    def admit(
        self,
        room: int,
        page_keys: PageKeys,
        page_count: int,
        *,
        arrange: Arrange | None = None,
    ) -> Admission | None:
        """Open a room of `page_count` pages on the longest cached prefix of `page_keys`.

        The prefix is locked, the least recently used unlocked prefixes are evicted as far as
        needed (where any are, by a stripe of each owner more), and the rest is drawn so that
        the whole list lies level over the owners. A caller that must compute at least one token
        passes fewer keys than the prompt has pages. `arrange` may put the drawn pages in another
        order, given the position of the first of them.
        Returns None when the room does not fit beside the rooms that are open now; CapacityError
        when it never can.
        """
        self._requests.refuse_open(room)
        self._check_page_count(page_count)
        keys = self._keys(page_keys, page_count)
        match = self._cache.match(keys)
        missing = page_count - match.page_count
        if missing > self.available_pages + self.cached_pages - match.evictable_pages:
            return None
        end = self._cache.lock(match)
        prefix = self._cache.path_pages(end)
        drawn = self._draw(missing, prefix)
        if arrange is not None:
            try:
                drawn = _checked_order(drawn, arrange(drawn, len(prefix)))
            except BaseException:
                self._allocator.free(drawn)
                self._cache.unlock(end)
                raise
        pages = LogicalPages(np.concatenate([prefix, drawn]))
        self._rooms[room] = _Room(end, keys[: len(prefix)].copy())
        self._requests.open(room, pages, len(prefix) * self.page_size)
        return Admission(self._requests.pages(room), len(prefix))

    def extend(self, room: int, page_count_more: int) -> LogicalPages | None:
        """Draw more pages for a room, e.g. for tokens that it generates. None: not now."""
        held = self._requests.pages(room)
        if page_count_more < 0:
            raise LayoutError("a room cannot shrink", value=page_count_more, allowed=">= 0 pages")
        self._check_page_count(len(held) + page_count_more)
        if page_count_more > self.available_pages + self.cached_pages:
            return None
        drawn = self._draw(page_count_more, held)
        self._requests.append(room, drawn)
        return drawn

    def publish(self, room: int, page_keys: PageKeys) -> None:
        """Offer the room's first len(page_keys) pages, whose KV is written, to other rooms.

        May be called again with more keys as chunks are done; keys published before must be
        the same. The pages stay locked until `release`. Where another room has published the
        same prefix first, the cache keeps that room's pages, and this one goes on reading its
        own until it is released.
        """
        held = self._requests.pages(room)
        keys = self._keys(page_keys, len(held))
        state = self._rooms[room]
        _refuse_other_keys(room, state.published, keys)
        done = len(state.published)
        if len(keys) <= done:
            return
        fresh = slice(done, len(keys))
        end, known = self._cache.insert(state.end, keys[fresh], LogicalPages(held[fresh]))
        state.end, state.published = end, keys.copy()
        if known:
            state.own_copies.append((done, done + known))

    def fork(
        self, room: int, new_room: int, page_keys: PageKeys, page_count: int
    ) -> Admission | None:
        """Open a room that shares what its parent has published of `page_keys`.

        As `admit`, with a sure hit: an open parent's published pages are never evicted. Pages
        that the parent has not published yet are not shared, since it may still write to them.
        The keys must begin like the parent's, for as long as both last.
        """
        self._requests.pages(room)  # refuses a parent that is not open
        keys = self._keys(page_keys, page_count)
        _refuse_other_keys(room, self._rooms[room].published, keys)
        return self.admit(new_room, page_keys, page_count)

    def release(self, room: int) -> None:
        """Close a room that has finished or was aborted, once nothing can touch its pages.

        What it published stays cached; its other pages are free at once.
        """
        held = self._requests.close(room)
        state = self._rooms.pop(room)
        self._cache.unlock(state.end)
        self._allocator.free(_private_pages(held, state))

    def evict(self, page_count: int) -> int:
        """Free up to `page_count` cached pages, least recently used first. Returns how many."""
        evicted = self._uncache(page_count)
        self.evicted_pages_total += evicted
        return evicted

    def clear(self) -> int:
        """Free every cached page that no room has locked. Returns how many; nobody needed their
        place, so they do not count as evicted."""
        return self._uncache(self.cached_pages)

    def pages(self, room: int) -> LogicalPages:
        """The room's logical pages by position, read-only."""
        return self._requests.pages(room)

    def length_tokens(self, room: int) -> int:
        """Tokens placed so far: those of the cached prefix, then those of each `advance`."""
        return self._requests.length_tokens(room)

    def advance(self, room: int, token_count: int) -> LogicalLocs:
        """Place the room's next tokens: i64[token_count], where their KV goes."""
        return self._requests.advance(room, token_count)

    def logical_locs(self, room: int, start_token: int, stop_token: int) -> LogicalLocs:
        """Where the KV of the room's placed tokens start..stop-1 is: i64[stop - start]."""
        return self._requests.logical_locs(room, start_token, stop_token)

    def check_invariants(self) -> None:
        """Prove that every page is free, cached or locked, and no page is two of these.

        Checks the parts and then that they agree: the locks in the radix tree are those of the
        open rooms, and a room reads the tree's pages wherever it has no copies of its own.
        Takes time in proportion to the pool. Raises InvariantError with what is wrong.
        """
        self._allocator.check_invariants()
        self._cache.check_invariants()
        self._requests.check_invariants()
        _require(list(self._rooms) == list(self._requests.rooms), "rooms differ from the table's")

        places = [self._allocator.free_pages(), *(node.pages for node in self._cache.nodes())]
        locks: Counter[RadixNode] = Counter()
        for room, state in self._rooms.items():
            held, published = self._requests.pages(room), len(state.published)
            locks.update(self._cache.path(state.end))
            shared = self._cache.path_pages(state.end)
            _require(len(shared) == published, f"room {room} has not locked what it published")
            own = np.zeros(published, np.bool_)
            for start, stop in state.own_copies:
                own[start:stop] = True
            _require(np.array_equal(held[:published] != shared, own), f"room {room} lost a page")
            places.append(_private_pages(held, state))
        for node in self._cache.nodes():
            _require(node.locks == locks[node], "locks differ from what the rooms hold")
        every_page = np.sort(np.concatenate(places))
        _require(
            np.array_equal(every_page, np.arange(1, self.total_pages + 1)),
            "available + cached + locked pages are not the pool's pages, once each",
        )

    def _uncache(self, page_count: int) -> int:
        pages = self._cache.evict(page_count)
        self._allocator.free(pages)
        return len(pages)

    def _keys(self, page_keys: PageKeys, page_limit: int | None = None) -> KeyRows:
        rows = key_rows(page_keys)
        if page_limit is not None and len(rows) > page_limit:
            raise LayoutError(
                "more page keys than pages", value=len(rows), allowed=f"<= {page_limit}"
            )
        return rows if self.prefix_caching else rows[:0]

    def _check_page_count(self, page_count: int) -> None:
        check_whole_number("pages of a room", page_count, at_least=0)
        if page_count > self.total_pages:
            raise CapacityError(
                "a request (room) can never fit the pool",
                value=f"{page_count} pages",
                allowed=f"at most {self.total_pages} pages",
                change="shorten the prompt, lower max_tokens or add ranks",
            )

    def _draw(self, page_count: int, request_pages: LogicalPages) -> LogicalPages:
        """Draw pages that the caller knows to be free or cached, evicting what it takes."""
        missing = page_count - self.available_pages
        if missing > 0:
            self.evict(missing + self._spare_pages)
        return self._allocator.draw(page_count, request_pages)


def _checked_order(drawn: LogicalPages, arranged: LogicalPages) -> LogicalPages:
    """`arranged`, which must hold just the drawn pages: no other page is the room's to use."""
    if not np.array_equal(np.sort(drawn), np.sort(arranged)):
        raise InvariantError("arranged pages are not the drawn ones", value=len(arranged))
    return arranged


def _private_pages(held: LogicalPages, state: _Room) -> LogicalPages:
    """The pages of a room that the prefix cache does not hold."""
    copies = [held[start:stop] for start, stop in state.own_copies]
    return LogicalPages(np.concatenate([*copies, held[len(state.published) :]]))


def _refuse_other_keys(room: int, published: KeyRows, keys: KeyRows) -> None:
    both = min(len(published), len(keys))
    if not np.array_equal(published[:both], keys[:both]):
        raise LayoutError(
            f"page keys differ from those of room {room}",
            value=f"in the first {both} pages",
            allowed="keys that begin as those it was admitted with and has published",
            change="pass the keys of the same prompt",
        )


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvariantError(f"logical pool: {what}")
