"""The radix tree by itself: match, lock, insert, split, unlock, evict."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cp_shared_kv.errors import InvariantError, LayoutError
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.prefix_cache import PrefixCache, RadixNode, key_rows


class Cache:
    """A PrefixCache that takes keys as text, one letter a page, and numbers pages as told."""

    def __init__(self) -> None:
        self.tree = PrefixCache()

    def match(self, keys: str) -> int:
        return self.tree.match(self._rows(keys)).page_count

    def lock(self, keys: str) -> RadixNode:
        return self.tree.lock(self.tree.match(self._rows(keys)))

    def open(self, keys: str, first_page: int) -> RadixNode:
        """Lock what is cached of `keys` and insert the rest as pages `first_page`, + 1, ..."""
        end, cached = self.lock(keys), self.match(keys)
        pages = LogicalPages(first_page + np.arange(len(keys) - cached))
        return self.tree.insert(end, self._rows(keys[cached:]), pages)[0]

    def put(self, keys: str, first_page: int) -> None:
        self.tree.unlock(self.open(keys, first_page))

    def evict(self, page_count: int) -> list[int]:
        return self.tree.evict(page_count).tolist()

    def counts(self) -> tuple[int, int]:
        return self.tree.evictable_pages, self.tree.locked_pages

    def runs(self) -> list[list[int]]:
        return sorted(node.pages.tolist() for node in self.tree.nodes())

    @staticmethod
    def _rows(keys: str) -> np.ndarray:
        return key_rows(np.array(list(keys), dtype="U1"))


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache()
    yield cache
    cache.tree.check_invariants()


class TestMatch:
    def test_the_longest_prefix_is_found_and_nothing_else(self, cache: Cache) -> None:
        cache.put("abcd", 1)
        cache.put("abxy", 10)
        for keys, pages in (("", 0), ("a", 1), ("abcz", 3), ("abxyz", 4), ("bcd", 0), ("xy", 0)):
            assert cache.match(keys) == pages

    def test_a_match_neither_splits_nor_counts_as_use(self, cache: Cache) -> None:
        cache.put("abcd", 1)
        cache.put("xyz", 5)
        cache.match("ab")
        assert cache.runs() == [[1, 2, 3, 4], [5, 6, 7]]
        assert cache.evict(1) == [4]

    def test_pages_that_a_lock_would_save_are_counted(self, cache: Cache) -> None:
        cache.put("abcd", 1)
        end = cache.lock("ab")
        match = cache.tree.match(Cache._rows("abcx"))
        assert (match.page_count, match.evictable_pages) == (3, 1)
        cache.tree.unlock(end)

    @pytest.mark.parametrize("dtype", ["<i8", "<i4", "V16", "S3", "f8"])
    def test_keys_of_any_fixed_size_dtype_are_compared_by_their_bytes(self, dtype: str) -> None:
        size = np.dtype(dtype).itemsize
        raw = np.arange(5 * size, dtype=np.uint8) + 1
        keys = raw.view(dtype)
        tree = PrefixCache()
        tree.insert(tree.root, key_rows(keys), LogicalPages(np.arange(1, 6)))
        raw[4 * size - 1] += 1  # the last byte of the fourth key
        assert tree.match(key_rows(keys)).page_count == 3

    def test_keys_of_another_width_never_match(self, cache: Cache) -> None:
        cache.put("\0\0", 1)
        assert cache.tree.match(key_rows(np.zeros(2, np.int64))).page_count == 0

    @pytest.mark.parametrize(
        "keys", [np.zeros((2, 2), np.int64), np.array([None, 1]), np.zeros(2, "V0")]
    )
    def test_keys_of_a_wrong_form_are_refused(self, keys: np.ndarray) -> None:
        with pytest.raises(LayoutError):
            key_rows(keys)

    def test_later_changes_of_the_callers_arrays_do_not_reach_the_tree(self) -> None:
        tree, keys, pages = PrefixCache(), np.arange(3), LogicalPages(np.arange(1, 4))
        tree.insert(tree.root, key_rows(keys), pages)
        keys[:], pages[:] = 9, 9
        match = tree.match(key_rows(np.arange(3)))
        assert tree.path_pages(tree.lock(match)).tolist() == [1, 2, 3]


class TestStructure:
    def test_a_lock_inside_a_run_splits_it_and_the_last_unlock_joins_it_again(
        self, cache: Cache
    ) -> None:
        cache.put("abcd", 1)
        first, second = cache.lock("ab"), cache.lock("abc")
        assert cache.runs() == [[1, 2], [3], [4]]
        assert cache.tree.path_pages(second).tolist() == [1, 2, 3]
        assert cache.counts() == (1, 3)
        cache.tree.unlock(second)
        assert cache.counts() == (2, 2)
        cache.tree.unlock(first)
        assert cache.counts() == (4, 0)

    def test_a_run_that_grows_chunk_by_chunk_ends_as_one_node(self, cache: Cache) -> None:
        end = cache.open("ab", 1)
        for key, page in (("c", 3), ("d", 4)):
            rows = Cache._rows(key)
            end, known = cache.tree.insert(end, rows, LogicalPages(np.array([page])))
            assert known == 0
        assert len(cache.runs()) == 3
        cache.tree.unlock(end)
        assert cache.runs() == [[1, 2, 3, 4]]

    def test_branches_stay_apart(self, cache: Cache) -> None:
        cache.put("abcd", 1)
        cache.put("abxy", 11)
        assert cache.runs() == [[1, 2], [3, 4], [11, 12]]

    def test_locks_above_a_split_still_hold_both_parts(self, cache: Cache) -> None:
        long = cache.open("abcd", 1)
        short = cache.lock("ab")
        cache.tree.unlock(short)
        assert cache.counts() == (0, 4)
        assert cache.evict(4) == []
        cache.tree.unlock(long)
        assert cache.counts() == (4, 0)

    def test_pages_that_the_tree_has_already_stay_the_trees(self, cache: Cache) -> None:
        mine, theirs = cache.lock("abcd"), cache.open("abc", 1)
        rows = Cache._rows("abcd")
        end, known = cache.tree.insert(mine, rows, LogicalPages(np.array([21, 22, 23, 24])))
        assert known == 3
        assert cache.tree.path_pages(end).tolist() == [1, 2, 3, 24]
        cache.tree.unlock(theirs)
        assert cache.counts() == (0, 4)
        cache.tree.unlock(end)
        assert cache.counts() == (4, 0)

    def test_an_unlock_too_many_is_refused(self, cache: Cache) -> None:
        end = cache.open("ab", 1)
        cache.tree.unlock(end)
        with pytest.raises(InvariantError, match="more often"):
            cache.tree.unlock(end)


class TestEvict:
    def test_the_least_recently_used_goes_first_from_its_end(self, cache: Cache) -> None:
        cache.put("abcd", 1)
        cache.put("xyz", 11)
        assert cache.evict(2) == [3, 4]
        assert cache.match("abcd") == 2
        cache.tree.unlock(cache.lock("a"))  # a and b are two runs now, and b is the older
        assert cache.evict(1) == [2]
        assert cache.evict(2) == [12, 13]
        assert cache.match("abcd") == 1

    def test_just_as_many_as_asked_across_leaves(self, cache: Cache) -> None:
        cache.put("ab", 1)
        cache.put("cd", 3)
        cache.put("ef", 5)
        assert sorted(cache.evict(5)) == [1, 2, 3, 4, 6]
        assert cache.runs() == [[5]]

    def test_a_prefix_goes_after_all_that_was_built_on_it(self, cache: Cache) -> None:
        cache.put("ab", 1)
        cache.put("abc", 3)
        cache.put("abd", 4)
        cache.put("x", 5)
        assert [cache.evict(1) for _ in range(6)] == [[3], [4], [2], [1], [5], []]

    def test_locked_prefixes_stay_and_fewer_are_returned(self, cache: Cache) -> None:
        cache.put("abcd", 1)
        end = cache.lock("ab")
        assert cache.evict(9) == [3, 4]
        assert cache.evict(1) == []
        assert cache.match("abcd") == 2
        cache.tree.unlock(end)
        assert cache.evict(9) == [1, 2]
        assert cache.runs() == []

    def test_a_leaf_that_was_locked_meanwhile_takes_its_new_turn(self, cache: Cache) -> None:
        cache.put("a", 1)
        cache.put("b", 2)
        cache.tree.unlock(cache.lock("a"))
        assert cache.evict(2) == [2, 1]

    def test_no_or_negative_pages_evict_none(self, cache: Cache) -> None:
        cache.put("abc", 1)
        assert cache.evict(0) == []
        assert cache.evict(-1) == []
        assert cache.counts() == (3, 0)

    def test_turns_that_are_over_do_not_pile_up(self, cache: Cache) -> None:
        cache.put("ab", 1)
        for _ in range(1000):
            cache.tree.unlock(cache.lock("ab"))
        assert len(cache.tree._eviction_order) < 100


def damage_first_key(tree: PrefixCache, node: RadixNode) -> None:
    node.keys = node.keys + 1


def damage_empty(tree: PrefixCache, node: RadixNode) -> None:
    node.pages, node.keys = node.pages[:0], node.keys[:0]


def damage_key_count(tree: PrefixCache, node: RadixNode) -> None:
    node.pages = LogicalPages(node.pages[:1])


def damage_parent(tree: PrefixCache, node: RadixNode) -> None:
    next(iter(node.children.values())).parent = tree.root


def damage_time(tree: PrefixCache, node: RadixNode) -> None:
    node.last_used = 0


def damage_locks(tree: PrefixCache, node: RadixNode) -> None:
    next(iter(node.children.values())).locks += 1


def damage_turns(tree: PrefixCache, node: RadixNode) -> None:
    tree._eviction_order.clear()


def damage_leaves(tree: PrefixCache, node: RadixNode) -> None:
    tree._unlocked_leaves.clear()


def damage_evictable(tree: PrefixCache, node: RadixNode) -> None:
    tree.evictable_pages += 1


def damage_locked(tree: PrefixCache, node: RadixNode) -> None:
    tree.locked_pages -= 1


def damage_pages(tree: PrefixCache, node: RadixNode) -> None:
    node.pages = LogicalPages(np.full_like(node.pages, node.pages[0]))


@pytest.mark.parametrize(
    "damage",
    [
        damage_first_key,
        damage_empty,
        damage_key_count,
        damage_parent,
        damage_time,
        damage_locks,
        damage_turns,
        damage_leaves,
        damage_evictable,
        damage_locked,
        damage_pages,
    ],
)
def test_each_kind_of_damage_breaks_an_invariant(
    damage: Callable[[PrefixCache, RadixNode], None],
) -> None:
    cache = Cache()
    cache.put("abcd", 1)
    cache.put("abxy", 11)
    cache.tree.check_invariants()
    shared = next(node for node in cache.tree.nodes() if node.pages[0] == 1)
    damage(cache.tree, shared)
    with pytest.raises(InvariantError, match="prefix cache: "):
        cache.tree.check_invariants()
