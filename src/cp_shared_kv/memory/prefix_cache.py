"""Radix tree over page-aligned prefixes: match, lock, insert, evict.

A node holds a run of pages as two arrays (keys and logical pages), so that work grows with the
number of nodes on a path and not with the number of pages. The cache decides nothing about
rooms or free pages: logical_pool does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import InvariantError, LayoutError
from cp_shared_kv.layout.pages import LogicalPages

KeyRows = npt.NDArray[np.uint8]  # [pages, key_bytes]


def key_rows(page_keys: npt.NDArray[np.generic]) -> KeyRows:
    """View page keys of any fixed-size dtype as bytes: [n] -> u8[n, itemsize].

    Keys are compared by their bytes, so all keys of one prompt must share one dtype.
    Raises LayoutError for arrays that are not one-dimensional or whose items have no bytes.
    """
    keys = np.asarray(page_keys)
    if keys.ndim != 1 or keys.dtype.hasobject or keys.dtype.itemsize == 0:
        raise LayoutError(
            "page keys have the wrong form",
            value=f"{keys.dtype}{list(keys.shape)}",
            allowed="a one-dimensional array of a fixed-size dtype, one value a page",
        )
    width = keys.dtype.itemsize
    return np.ascontiguousarray(keys).view(np.uint8).reshape(len(keys), width)


def common_pages(a: KeyRows, b: KeyRows) -> int:
    """How many leading pages of two key runs are equal."""
    shorter = min(len(a), len(b))
    if not shorter:
        return 0
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax())
    return first // a.shape[1] if differs.flat[first] else shorter


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of cached pages that all requests through it share. Only the tree changes it."""

    keys: KeyRows
    pages: LogicalPages
    parent: RadixNode | None
    last_used: int
    locks: int = 0  # rooms whose published prefix ends in this node or below it
    children: dict[bytes, RadixNode] = field(default_factory=dict[bytes, "RadixNode"])

    @property
    def first_key(self) -> bytes:
        return self.keys[0].tobytes()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of some keys. Good until the cache next changes."""

    steps: tuple[tuple[RadixNode, int], ...]  # (node, how many of its pages match), from the root

    @property
    def page_count(self) -> int:
        return sum(count for _, count in self.steps)

    @property
    def evictable_pages(self) -> int:
        """Matched pages that nobody has locked yet: a lock takes them out of eviction's reach."""
        return sum(count for node, count in self.steps if node.locks == 0)


class PrefixCache:
    """Cached prefixes of one logical pool. Single-threaded; the prefill controller owns it.

    Invariants, proved by `check_invariants`: children are keyed by their first key; no node but
    the root is empty; a node has at least the locks of its children together; a parent was used
    no earlier than its children; the unlocked leaves, and they alone, wait for eviction in the
    order of their last use; no page is twice in the tree; the two page counts add up.
    """

    def __init__(self) -> None:
        self.evictable_pages = 0
        self.locked_pages = 0
        self._root = RadixNode(
            keys=np.empty((0, 0), np.uint8),
            pages=LogicalPages(np.empty(0, np.int64)),
            parent=None,
            last_used=0,
        )
        self._clock = 0
        # Unlocked leaves by last use. No two of them share a time: an unlock stamps one path.
        self._unlocked_leaves: dict[int, RadixNode] = {}
        # The same times as a heap; times that left the dict are dropped when they surface.
        self._eviction_order: list[int] = []

    @property
    def root(self) -> RadixNode:
        """Where a room that has no cached prefix starts."""
        return self._root

    def match(self, keys: KeyRows) -> PrefixMatch:
        """Find the longest cached prefix of `keys` u8[pages, key_bytes]; nothing changes."""
        return PrefixMatch(tuple(self._descend(self._root, keys)))

    def lock(self, match: PrefixMatch) -> RadixNode:
        """Keep a match from eviction until `unlock` of the node that is returned."""
        end = self._end_of(match.steps, self._root)
        self._lock_between(end, self._root)
        return end

    def insert(
        self, end: RadixNode, keys: KeyRows, logical_pages: LogicalPages
    ) -> tuple[RadixNode, int]:
        """Grow the prefix that a caller has locked up to `end` by pages whose KV is written.

        `keys` u8[n, key_bytes] and `logical_pages` i64[n] continue the prefix below `end`.
        Returns (the new end, locked instead of the old one; how many of the n pages the tree
        held already). Those stay the tree's: the caller's own copies of them are not taken.
        """
        steps = tuple(self._descend(end, keys))
        known = sum(count for _, count in steps)
        new_end = self._end_of(steps, end)
        self._lock_between(new_end, end)
        if known < len(keys):
            leaf = RadixNode(
                keys=keys[known:].copy(),
                pages=LogicalPages(logical_pages[known:].copy()),
                parent=new_end,
                last_used=new_end.last_used,
                locks=1,
            )
            new_end.children[leaf.first_key] = leaf
            self.locked_pages += len(leaf.pages)
            new_end = leaf
        return new_end, known

    def unlock(self, end: RadixNode) -> None:
        """Give back the lock of `lock` or `insert`; the whole path becomes the last used."""
        if end is self._root:
            return
        if end.locks == 0:
            raise InvariantError("a prefix is unlocked more often than it was locked")
        self._clock += 1
        for node in self.path(end):
            node.last_used = self._clock
            node.locks -= 1
            if node.locks == 0:
                self._move_to_evictable(len(node.pages))
        if end.locks == 0:
            self._join_single_children(end)
            if not end.children:
                self._await_eviction(end)

    def evict(self, page_count: int) -> LogicalPages:
        """Drop up to `page_count` unlocked pages and return them, least recently used first.

        Pages go from the ends of prefixes: of the leaf that comes last in turn only as many
        pages as are still wanted. Fewer are returned only when no unlocked page is left.
        """
        wanted = max(0, min(page_count, self.evictable_pages))
        self.evictable_pages -= wanted
        evicted: list[LogicalPages] = []
        while wanted > 0:
            leaf = self._unlocked_leaves.get(self._eviction_order[0])
            if leaf is None:
                heapq.heappop(self._eviction_order)
                continue
            kept = max(0, len(leaf.pages) - wanted)
            evicted.append(LogicalPages(leaf.pages[kept:]))
            wanted -= len(leaf.pages) - kept
            if kept:
                self._cut(leaf, kept)
            else:
                self._remove(leaf)
        return LogicalPages(np.concatenate(evicted) if evicted else np.empty(0, np.int64))

    def path(self, end: RadixNode) -> Iterator[RadixNode]:
        """The nodes of a prefix from its end up to, and without, the root."""
        node = end
        while node.parent is not None:
            yield node
            node = node.parent

    def path_pages(self, end: RadixNode) -> LogicalPages:
        """The logical pages of the prefix that ends with `end`, i64[pages] by position."""
        runs = [node.pages for node in self.path(end)]
        return LogicalPages(np.concatenate(runs[::-1]) if runs else np.empty(0, np.int64))

    def unlocked_pages(self) -> LogicalPages:
        """The pages that could be evicted, in no order. Takes time in proportion to the tree."""
        runs = [node.pages for node in self.nodes() if node.locks == 0]
        return LogicalPages(np.concatenate(runs) if runs else np.empty(0, np.int64))

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the root, parents before children."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    # How the tree changes

    def _descend(self, node: RadixNode, keys: KeyRows) -> Iterator[tuple[RadixNode, int]]:
        done = 0
        while done < len(keys):
            child = node.children.get(keys[done].tobytes())
            if child is None:
                return
            common = common_pages(child.keys, keys[done:])
            yield child, common
            if common < len(child.pages):
                return
            node, done = child, done + common

    def _end_of(self, steps: tuple[tuple[RadixNode, int], ...], start: RadixNode) -> RadixNode:
        """The node where a walk ended, split so that the walk took all of its pages."""
        if not steps:
            return start
        node, count = steps[-1]
        return node if count == len(node.pages) else self._split(node, count)

    def _split(self, node: RadixNode, count: int) -> RadixNode:
        """Put the first `count` pages of a node above it. Returns the upper part.

        The object that was there stays the lower part: locks that end in it hold both parts.
        """
        parent = _parent_of(node)
        upper = RadixNode(
            keys=node.keys[:count].copy(),
            pages=LogicalPages(node.pages[:count].copy()),
            parent=parent,
            last_used=node.last_used,
            locks=node.locks,
        )
        parent.children[upper.first_key] = upper
        # Copies, so that an evicted part does not keep the other's memory alive.
        node.keys = node.keys[count:].copy()
        node.pages = LogicalPages(node.pages[count:].copy())
        node.parent = upper
        upper.children[node.first_key] = node
        return upper

    def _join_single_children(self, end: RadixNode) -> None:
        """Make each unbranched, unlocked run of nodes above `end` one node again.

        Nothing is lost: no lock can end in an unlocked node, and the unlock that comes before
        has given the whole path one time of use.
        """
        bottom = end
        while bottom.parent is not None and bottom.locks == 0:
            run = [bottom]
            above = bottom.parent
            while above.parent is not None and above.locks == 0 and len(above.children) == 1:
                run.append(above)
                above = above.parent
            if len(run) > 1:
                run.reverse()
                bottom.keys = np.concatenate([node.keys for node in run])
                bottom.pages = LogicalPages(np.concatenate([node.pages for node in run]))
                bottom.parent = above
                above.children[bottom.first_key] = bottom
            bottom = above

    def _lock_between(self, end: RadixNode, above: RadixNode) -> None:
        """Add one lock to each node from `end` up to, and without, `above`."""
        for node in self.path(end):
            if node is above:
                return
            if node.locks == 0:
                self._move_to_evictable(-len(node.pages))
                if not node.children:
                    del self._unlocked_leaves[node.last_used]
            node.locks += 1

    def _move_to_evictable(self, page_count: int) -> None:
        self.evictable_pages += page_count
        self.locked_pages -= page_count

    def _await_eviction(self, leaf: RadixNode) -> None:
        self._unlocked_leaves[leaf.last_used] = leaf
        heapq.heappush(self._eviction_order, leaf.last_used)
        # Times that are no longer waited for would pile up while nothing is evicted.
        if len(self._eviction_order) > 2 * len(self._unlocked_leaves) + 64:
            self._eviction_order = sorted(self._unlocked_leaves)

    def _cut(self, leaf: RadixNode, kept: int) -> None:
        leaf.keys = leaf.keys[:kept].copy()
        leaf.pages = LogicalPages(leaf.pages[:kept].copy())

    def _remove(self, leaf: RadixNode) -> None:
        parent = _parent_of(leaf)
        del self._unlocked_leaves[leaf.last_used]
        del parent.children[leaf.first_key]
        if parent.parent is not None and parent.locks == 0 and not parent.children:
            self._await_eviction(parent)

    def check_invariants(self) -> None:
        """Walk the whole tree. Raises InvariantError with the first thing that is wrong."""
        pages: list[LogicalPages] = []
        evictable = locked = 0
        leaves: dict[int, RadixNode] = {}
        for node in self.nodes():
            parent = _parent_of(node)
            _require(len(node.pages) > 0, "a node holds no page")
            _require(len(node.keys) == len(node.pages), "a node has not one key a page")
            _require(parent.children.get(node.first_key) is node, "a child has another key")
            _require(parent.last_used >= node.last_used or parent is self._root, "use out of order")
            for child in node.children.values():
                _require(child.parent is node, "a child names another parent")
            below = sum(child.locks for child in node.children.values())
            _require(node.locks >= below, "a node has fewer locks than its children")
            pages.append(node.pages)
            if node.locks:
                locked += len(node.pages)
                continue
            evictable += len(node.pages)
            if not node.children:
                _require(node.last_used not in leaves, "two unlocked leaves share a time of use")
                leaves[node.last_used] = node
        _require(leaves == self._unlocked_leaves, "unlocked leaves do not all await eviction")
        _require(leaves.keys() <= set(self._eviction_order), "a leaf is not in eviction's order")
        _require(evictable == self.evictable_pages, "evictable pages are miscounted")
        _require(locked == self.locked_pages, "locked pages are miscounted")
        held = np.concatenate(pages) if pages else np.empty(0, np.int64)
        _require(len(np.unique(held)) == len(held), "a page is twice in the tree")


def _parent_of(node: RadixNode) -> RadixNode:
    if node.parent is None:
        raise InvariantError("the root of the prefix cache was treated as a cached run")
    return node.parent


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvariantError(f"prefix cache: {what}")
