"""Random lives of rooms in a small pool, step by step against a model of plain dicts and sets.

The model knows no runs, splits, heaps or bitmaps: it keeps one entry for each cached page under
the whole tuple of keys that leads to it, scans everything for the least recently used, and deals
pages to owners one at a time. So it predicts each answer of the pool: matches, cached prefixes
page by page, whether a room fits, what is evicted, and the owner of every page drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cp_shared_kv.errors import CapacityError, InvariantError
from cp_shared_kv.layout import KVCapacity
from cp_shared_kv.memory.logical_pool import Admission, LogicalPool

PAGE_SIZE = 4
Prompt = tuple[int, ...]


@dataclass
class CachedPage:
    page: int
    last_used: int


@dataclass
class ModelRoom:
    prompt: Prompt
    pages: list[int]
    published: int
    placed_tokens: int


class Model:
    """What the pool should do, in the fewest ideas and with no regard for speed."""

    def __init__(self, physical_pages: int, cp_size: int, stripe_pages: int) -> None:
        self.cp_size, self.stripe_pages = cp_size, stripe_pages
        self.total = physical_pages * cp_size
        self.free = set(range(1, self.total + 1))
        self.cached: dict[Prompt, CachedPage] = {}
        self.rooms: dict[int, ModelRoom] = {}
        self.clock = 0

    def owner(self, page: int) -> int:
        return (page - 1) // self.stripe_pages % self.cp_size

    def hit(self, keys: Prompt) -> int:
        pages = 0
        while pages < len(keys) and keys[: pages + 1] in self.cached:
            pages += 1
        return pages

    def locked(self) -> set[Prompt]:
        return {
            room.prompt[: count + 1]
            for room in self.rooms.values()
            for count in range(room.published)
        }

    def unlocked(self) -> set[Prompt]:
        return set(self.cached) - self.locked()

    def evict(self, page_count: int) -> int:
        unlocked = self.unlocked()
        evicted = 0
        while evicted < page_count and unlocked:
            with_more = {prompt[:-1] for prompt in self.cached}
            last = min(unlocked - with_more, key=lambda prompt: self.cached[prompt].last_used)
            self.free.add(self.cached.pop(last).page)
            unlocked.remove(last)
            evicted += 1
        return evicted

    def draw(self, held: list[int], drawn: list[int]) -> None:
        """Take the pages that the pool has drawn, unless the policy would have drawn others."""
        spread = [sum(self.owner(page) == owner for page in held) for owner in range(self.cp_size)]
        for page in drawn:
            free = [0] * self.cp_size
            for other in self.free:
                free[self.owner(other)] += 1
            first = self.owner(held[0]) if held else free.index(max(free))
            expected = min(
                (owner for owner in range(self.cp_size) if free[owner]),
                key=lambda o: (spread[o] // self.stripe_pages, (o - first) % self.cp_size),
            )
            assert self.owner(page) == expected
            self.free.remove(page)  # KeyError: it was not free
            spread[expected] += 1
            held = [*held, page]

    def make_room(self, page_count: int) -> None:
        missing = page_count - len(self.free)
        if missing > 0:
            self.evict(missing + self.cp_size * self.stripe_pages)


WORDS = st.lists(st.integers(0, 2), max_size=6).map(tuple)
HAS_ROOMS = precondition(lambda self: self.model.rooms)
HAS_CACHED = precondition(lambda self: self.model.unlocked())


class LogicalPoolMachine(RuleBasedStateMachine):
    @initialize(
        cp_size=st.integers(1, 4),
        stripe_pages=st.integers(1, 3),
        stripes=st.integers(2, 6),
        dtype=st.sampled_from(["<i8", "V16"]),
    )
    def start(self, cp_size: int, stripe_pages: int, stripes: int, dtype: str) -> None:
        capacity = KVCapacity(stripes * stripe_pages, PAGE_SIZE, cp_size, stripe_pages)
        self.pool = LogicalPool(capacity)
        self.model = Model(capacity.physical_pages, cp_size, stripe_pages)
        self.dtype = dtype
        self.next_room = 0

    def keys(self, prompt: Prompt) -> np.ndarray:
        words = np.array([(key, 7) for key in prompt], np.int64).reshape(-1, 2)
        return words[:, 0].copy() if self.dtype == "<i8" else words.view("V16")[:, 0]

    def room(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.rooms)), label="room")

    def prompt(self, data: st.DataObject) -> Prompt:
        """Part of a prompt that is cached, and something after it."""
        known = sorted(self.model.cached)
        base = data.draw(st.sampled_from(known), label="base") if known else ()
        return (*base, *data.draw(WORDS, label="more"))[: self.model.total]

    @rule(data=st.data(), withheld=st.integers(0, 2), tail_pages=st.integers(0, 2))
    def admit(self, data: st.DataObject, withheld: int, tail_pages: int) -> None:
        prompt = self.prompt(data)
        self.admit_prompt(prompt, max(0, len(prompt) - withheld), len(prompt) + tail_pages)

    @rule(data=st.data(), requests=st.integers(1, 4))
    def serve(self, data: st.DataObject, requests: int) -> None:
        """Whole requests in one step, so that few steps fill the cache."""
        for _ in range(requests):
            prompt = self.prompt(data)
            room = self.next_room
            if self.admit_prompt(prompt, len(prompt), len(prompt)) is not None:
                self.publish_pages(room, len(prompt))
                self.release(room)

    def admit_prompt(self, prompt: Prompt, passed: int, page_count: int) -> Admission | None:
        room, keys = self.next_room, self.keys(prompt[:passed])
        return self.expect_admission(
            prompt, passed, page_count, lambda: self.pool.admit(room, keys, page_count)
        )

    @HAS_ROOMS
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=2))
    def fork(self, data: st.DataObject, more: list[int]) -> None:
        parent, room = self.room(data), self.next_room
        prompt = (*self.model.rooms[parent].prompt, *more)
        published = self.model.rooms[parent].published
        admission = self.expect_admission(
            prompt,
            len(prompt),
            len(prompt) + 1,
            lambda: self.pool.fork(parent, room, self.keys(prompt), len(prompt) + 1),
        )
        assert admission is None or admission.cached_pages >= published

    def expect_admission(self, prompt, passed, page_count, call) -> Admission | None:
        model, keys = self.model, prompt[:passed]
        if page_count > model.total:
            with pytest.raises(CapacityError, match=rf"{page_count} pages.*{model.total} pages"):
                call()
            return None
        hit = model.hit(keys)
        prefix = [keys[: count + 1] for count in range(hit)]
        reachable = model.unlocked() - set(prefix)
        admission = call()
        if page_count - hit > len(model.free) + len(reachable):
            assert admission is None
            return None
        assert admission is not None
        assert admission.cached_pages == hit
        pages = admission.logical_pages.tolist()
        assert len(pages) == page_count
        assert pages[:hit] == [model.cached[part].page for part in prefix]
        model.rooms[self.next_room] = ModelRoom(prompt, pages, hit, hit * PAGE_SIZE)
        model.make_room(page_count - hit)
        model.draw(pages[:hit], pages[hit:])
        self.next_room += 1
        return admission

    @HAS_ROOMS
    @rule(data=st.data(), more=st.integers(0, 4))
    def extend(self, data: st.DataObject, more: int) -> None:
        name, model = self.room(data), self.model
        room = model.rooms[name]
        if len(room.pages) + more > model.total:
            with pytest.raises(CapacityError):
                self.pool.extend(name, more)
            return
        drawn = self.pool.extend(name, more)
        if more > len(model.free) + len(model.unlocked()):
            assert drawn is None
            return
        assert drawn is not None
        assert len(drawn) == more
        model.make_room(more)
        model.draw(room.pages, drawn.tolist())
        room.pages += drawn.tolist()

    @HAS_ROOMS
    @rule(data=st.data(), token_count=st.integers(0, 3 * PAGE_SIZE))
    def advance(self, data: st.DataObject, token_count: int) -> None:
        name = self.room(data)
        room = self.model.rooms[name]
        start = room.placed_tokens
        stop = min(start + token_count, len(room.pages) * PAGE_SIZE)
        locs = self.pool.advance(name, stop - start)
        assert locs.tolist() == [
            room.pages[token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE
            for token in range(start, stop)
        ]
        room.placed_tokens = stop

    @HAS_ROOMS
    @rule(data=st.data(), page_count=st.integers(0, 20))
    def publish(self, data: st.DataObject, page_count: int) -> None:
        self.publish_pages(self.room(data), page_count)

    def publish_pages(self, name: int, page_count: int) -> None:
        room = self.model.rooms[name]
        keys = room.prompt[: min(page_count, len(room.pages))]
        self.pool.publish(name, self.keys(keys))
        for count in range(room.published, len(keys)):
            self.model.cached.setdefault(keys[: count + 1], CachedPage(room.pages[count], 0))
        room.published = max(room.published, len(keys))

    @HAS_ROOMS
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = self.room(data)
        self.publish_pages(name, len(self.model.rooms[name].prompt))
        self.release(name)

    @HAS_ROOMS
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.release(self.room(data))

    def release(self, name: int) -> None:
        model = self.model
        self.pool.release(name)
        room = model.rooms.pop(name)
        model.clock += 1
        for count in range(room.published):
            model.cached[room.prompt[: count + 1]].last_used = model.clock
        in_cache = {entry.page for entry in model.cached.values()}
        model.free |= set(room.pages) - in_cache
        with pytest.raises(InvariantError, match=f"not open: {name}"):
            self.pool.release(name)

    @HAS_CACHED
    @rule(page_count=st.integers(0, 8))
    def evict(self, page_count: int) -> None:
        assert self.pool.evict(page_count) == self.model.evict(page_count)

    @precondition(lambda self: len(self.model.unlocked()) > 8)
    @rule()
    def clear(self) -> None:
        unlocked = len(self.model.unlocked())
        assert self.pool.clear() == unlocked
        self.model.evict(unlocked)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        pool, model = self.pool, self.model
        pool.check_invariants()
        assert pool.available_pages == len(model.free)
        assert pool.cached_pages == len(model.unlocked())
        assert pool.available_pages + pool.cached_pages + pool.locked_pages == pool.total_pages
        free = [0] * model.cp_size
        for page in model.free:
            free[model.owner(page)] += 1
        assert pool.free_pages_per_owner().tolist() == free
        cached = [0] * model.cp_size
        for prompt in model.unlocked():
            cached[model.owner(model.cached[prompt].page)] += 1
        for most_bins in (1, 3):
            pages = pool.page_map(most_bins)
            assert pages.free.sum(axis=1).tolist() == free
            assert pages.cached.sum(axis=1).tolist() == cached
            assert pages.locked.sum() == pool.locked_pages
        # Every cached prefix is found and, as its number of pages is right too, nothing else.
        for prompt in model.cached:
            assert pool.match(self.keys((*prompt, 9))) == len(prompt)
        assert list(pool.rooms) == list(model.rooms)
        for name, room in model.rooms.items():
            assert pool.pages(name).tolist() == room.pages
            assert pool.length_tokens(name) == room.placed_tokens

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for name in list(self.model.rooms):
            self.release(name)
        self.pool.clear()
        self.pool.check_invariants()
        assert self.pool.available_pages == self.pool.total_pages


TestLogicalPoolMachine = LogicalPoolMachine.TestCase
TestLogicalPoolMachine.settings = settings(
    max_examples=90,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
