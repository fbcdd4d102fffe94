"""Where requests go: by load, by prefix, around what is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.router import PrefixIndex, Route, Router, chain_keys
from cp_shared_kv.memory.page_keys import page_keys

PAGE = 4
GROUPS = [Life("prefill", i, 1) for i in range(2)]
DECODES = [Life("decode", i, 1) for i in range(2)]


@dataclass
class Routed:
    """A router of two groups and two decode workers, and what went where."""

    policy: Literal["longest_prefix", "least_loaded", "round_robin"] = "longest_prefix"
    router: Router = field(init=False)
    rooms: int = 0

    def __post_init__(self) -> None:
        self.router = Router(self.policy, PAGE, group_pages=50, decode_pages=50)
        for group in GROUPS:
            for decode in DECODES:
                self.router.paired(group, decode)

    def send(self, tokens: list[int], max_tokens: int = 1) -> tuple[int, Route]:
        keys = page_keys(np.array(tokens), PAGE)
        route = self.router.choose(keys, len(tokens), self.router.pairs)
        assert route is not None
        self.rooms += 1
        self.router.book(self.rooms, route, keys, prompt_tokens=len(tokens), max_tokens=max_tokens)
        self.router.check_invariants()
        return self.rooms, route

    def send_and_end(self, tokens: list[int]) -> Route:
        room, route = self.send(tokens)
        self.router.ended(room)
        return route


def test_requests_spread_while_none_has_ended() -> None:
    for policy in ("longest_prefix", "least_loaded", "round_robin"):
        routed = Routed(policy)
        routes = [routed.send([n] * 20)[1] for n in range(4)]
        assert sorted(route.group for route in routes) == sorted(GROUPS * 2)
        assert sorted(route.decode for route in routes) == sorted(DECODES * 2)


def test_prompts_without_common_prefix_fill_all_pools_alike() -> None:
    routed = Routed()
    routes = [routed.send_and_end([n] * 20) for n in range(6)]
    assert [route.group for route in routes].count(GROUPS[0]) == 3


def test_a_prompt_follows_its_longest_prefix() -> None:
    routed = Routed()
    first = routed.send_and_end([1] * 40)
    other = routed.send_and_end([2] * 40)
    assert first.group != other.group
    assert routed.send_and_end([1] * 40 + [3] * 8) == first
    assert routed.send_and_end([2] * 40 + [3] * 8) == other


def test_round_robin_takes_turns_whatever_prefixes_and_loads_say() -> None:
    routed = Routed("round_robin")
    prompts = ([1] * 40, [1] * 40, [1] * 4, [1] * 40)
    routes = [routed.send(tokens)[1] for tokens in prompts]
    assert [route.group for route in routes] == [*GROUPS, *GROUPS]
    assert [route.decode for route in routes] == [*DECODES, *DECODES]


def test_round_robin_gives_the_next_life_of_a_lost_group_one_turn_and_no_more() -> None:
    routed = Routed("round_robin")
    for number in range(4):
        routed.send([number] * 8)
    after = GROUPS[0].next()
    routed.router.lost(GROUPS[0])
    for decode in DECODES:
        routed.router.paired(after, decode)
    assert [routed.send([9] * 8)[1].group for _ in range(4)] == [after, GROUPS[1]] * 2


def test_a_prefix_is_left_when_waiting_costs_more_than_it_saves() -> None:
    routed = Routed()
    home = routed.send_and_end([1] * 40)
    assert home.group == GROUPS[0]
    # 30 tokens wait there: fewer than the 40 that the prefix saves.
    routed.router.book(
        100, home, page_keys(np.array([5] * 30), PAGE), prompt_tokens=30, max_tokens=1
    )
    assert routed.send([1] * 40)[1].group == GROUPS[0]
    routed.router.book(
        101, home, page_keys(np.array([6] * 30), PAGE), prompt_tokens=30, max_tokens=1
    )
    assert routed.send([1] * 40)[1].group == GROUPS[1]


def test_least_loaded_knows_no_prefix() -> None:
    routed = Routed("least_loaded")
    busy, route = routed.send([1] * 40)
    assert routed.send([1] * 40)[1].group != route.group
    routed.router.prefilled(busy)
    assert routed.send([1] * 40)[1].group == route.group


def test_a_lost_group_gets_nothing_and_its_next_life_knows_no_prefix() -> None:
    routed = Routed()
    home = routed.send_and_end([1] * 40)
    room, _ = routed.send([1] * 44)
    routed.router.lost(home.group)
    route = routed.send([1] * 40)[1]
    assert route.group != home.group
    routed.router.ended(room)
    again = home.group.next()
    for decode in DECODES:
        routed.router.paired(again, decode)
    routed.router.check_invariants()
    assert Route(again, DECODES[0]) in routed.router.pairs
    assert home.group not in {pair.group for pair in routed.router.pairs}


def test_without_a_pair_there_is_no_route() -> None:
    routed = Routed()
    for decode in DECODES:
        routed.router.lost(decode)
    keys = page_keys(np.array([1] * 8), PAGE)
    assert routed.router.pairs == []
    assert routed.router.choose(keys, 8, routed.router.pairs) is None


def test_equal_pages_behind_different_beginnings_are_different_prefixes() -> None:
    one = chain_keys(page_keys(np.array([1] * 4 + [9] * 4), PAGE))
    two = chain_keys(page_keys(np.array([2] * 4 + [9] * 4), PAGE))
    assert one[1] != two[1]


def test_an_index_forgets_the_ends_of_the_oldest_prompts_first() -> None:
    index = PrefixIndex(capacity_pages=6)
    index.add([1, 2, 3, 4])
    index.add([10, 11, 12])
    assert len(index) == 6
    assert index.matched_pages([1, 2, 3, 4]) == 3
    assert index.matched_pages([10, 11, 12]) == 3


@given(st.lists(st.tuples(st.sampled_from("sped"), st.integers(0, 9)), max_size=40))
def test_loads_are_those_of_the_open_requests_whatever_happens(
    steps: list[tuple[str, int]],
) -> None:
    routed = Routed()
    number = [1]
    for what, value in steps:
        if what == "s" and routed.router.pairs:
            routed.send([value] * (1 + value * 3), max_tokens=value)
        elif what == "p":
            routed.router.prefilled(value)
        elif what == "e":
            routed.router.ended(value)
        elif what == "d":
            life = Life("prefill", value % 2, number[0])
            routed.router.lost(life)
            if value < 5:
                number[0] += 1
                routed.router.paired(Life("prefill", value % 2, number[0]), DECODES[value % 2])
        routed.router.check_invariants()
    for room in range(routed.rooms + 1):
        routed.router.ended(room)
    routed.router.check_invariants()
