"""Which prefill group and which decode worker takes a request. Knows loads and prefixes; no I/O.

longest_prefix takes the pair that would have the prompt computed first: the tokens that wait
there already, and those of the prompt that it does not hold. So a prefix is followed until
waiting for it costs more than computing it elsewhere. round_robin looks at neither: it is what
the others are compared with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cp_shared_kv.engine.config_values import RouterPolicy
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.errors import InvariantError

PageKeys = npt.NDArray[np.void]


@dataclass(frozen=True)
class Route:
    """Where a request goes: lives, so that a route never leads to a successor."""

    group: Life
    decode: Life


@dataclass
class _Booked:
    """What one request adds to the loads of its route."""

    route: Route
    prefill_tokens: int
    decode_tokens: int


@dataclass
class _Target:
    """A life of a group or a decode worker as the router knows it."""

    prefixes: PrefixIndex
    load_tokens: int = 0
    last_turn: int = 0
    """The number of the last request that it was given."""
    pairs: set[Life] = field(default_factory=set[Life])


class PrefixIndex:
    """Which prompts' pages a process was given lately, at most as many as its pool holds.

    An estimate: the process itself evicts by its own use and never reports it.
    """

    def __init__(self, capacity_pages: int) -> None:
        self._capacity_pages = capacity_pages
        self._chains: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chains)

    def matched_pages(self, chains: Sequence[int]) -> int:
        """Leading pages of a prompt that it holds."""
        for count, chain in enumerate(chains):
            if chain not in self._chains:
                return count
        return len(chains)

    def add(self, chains: Iterable[int]) -> None:
        """The pages of a prompt are there now, and the last to be forgotten."""
        for chain in reversed(list(chains)):  # a prefix outlives what goes on from it
            self._chains[chain] = None
            self._chains.move_to_end(chain)
        while len(self._chains) > self._capacity_pages:
            self._chains.popitem(last=False)


class Router:
    """Loads and prefixes of every pair that stands. `group_pages` and `decode_pages` are the
    logical pages of one group and of one decode worker."""

    def __init__(
        self, policy: RouterPolicy, page_size: int, *, group_pages: int, decode_pages: int
    ) -> None:
        self._policy = policy
        self._page_size = page_size
        self._group_pages, self._decode_pages = group_pages, decode_pages
        self._groups: dict[Life, _Target] = {}
        self._decodes: dict[Life, _Target] = {}
        self._booked: dict[int, _Booked] = {}
        self._turns = 0
        self._last_keys: PageKeys | None = None
        self._last_chains: list[int] = []

    # Who is there -----------------------------------------------------------------------------

    def paired(self, group: Life, decode: Life) -> None:
        """This group can send to this decode worker."""
        self._groups.setdefault(group, _Target(PrefixIndex(self._group_pages))).pairs.add(decode)
        self._decodes.setdefault(decode, _Target(PrefixIndex(self._decode_pages))).pairs.add(group)

    def lost(self, life: Life) -> None:
        """A group or a decode worker is gone, with what it held."""
        self._groups.pop(life, None)
        self._decodes.pop(life, None)
        for target in (*self._groups.values(), *self._decodes.values()):
            target.pairs.discard(life)

    @property
    def pairs(self) -> list[Route]:
        """Every pair that stands."""
        return [
            Route(group, decode)
            for group, target in self._groups.items()
            for decode in sorted(target.pairs)
        ]

    # Requests ---------------------------------------------------------------------------------

    def choose(self, keys: PageKeys, prompt_tokens: int, among: Iterable[Route]) -> Route | None:
        """The best of some pairs that stand for a prompt, by its page keys; None if there is none.

        The group first, then a decode worker that it can send to.
        """
        routes = list(among)
        if not routes:
            return None
        chains = self._chains(keys)
        group = self._best(self._groups, {r.group for r in routes}, chains, prompt_tokens)
        decodes = {route.decode for route in routes if route.group == group}
        return Route(group, self._best(self._decodes, decodes, chains, prompt_tokens))

    def _chains(self, keys: PageKeys) -> list[int]:
        """Made once for a prompt, which is chosen for and then booked: a long one takes a while."""
        if self._last_keys is not keys:
            self._last_keys, self._last_chains = keys, chain_keys(keys)
        return self._last_chains

    def book(
        self, room: int, route: Route, keys: PageKeys, *, prompt_tokens: int, max_tokens: int
    ) -> None:
        """A request goes this way: it counts until `prefilled` and `ended`."""
        group, decode = self._groups[route.group], self._decodes[route.decode]
        chains = self._chains(keys)
        held = group.prefixes.matched_pages(chains) * self._page_size
        booked = _Booked(route, prompt_tokens - held, prompt_tokens + max_tokens)
        self._booked[room] = booked
        self._turns += 1
        group.last_turn = decode.last_turn = self._turns
        group.load_tokens += booked.prefill_tokens
        decode.load_tokens += booked.decode_tokens
        group.prefixes.add(chains)
        decode.prefixes.add(chains)

    def prefilled(self, room: int) -> None:
        """The prompt is computed: it weighs on decode alone."""
        booked = self._booked.get(room)
        if booked is None:
            return
        group = self._groups.get(booked.route.group)
        if group is not None:
            group.load_tokens -= booked.prefill_tokens
        booked.prefill_tokens = 0

    def ended(self, room: int) -> None:
        """The request is over, however it ended."""
        self.prefilled(room)
        booked = self._booked.pop(room, None)
        decode = None if booked is None else self._decodes.get(booked.route.decode)
        if booked is not None and decode is not None:
            decode.load_tokens -= booked.decode_tokens

    def check_invariants(self) -> None:
        """Raise InvariantError unless the loads are those of the open requests."""
        for targets, what in ((self._groups, "prefill"), (self._decodes, "decode")):
            for life, target in targets.items():
                open_tokens = sum(
                    b.prefill_tokens if what == "prefill" else b.decode_tokens
                    for b in self._booked.values()
                    if life in (b.route.group, b.route.decode)
                )
                if open_tokens != target.load_tokens:
                    raise InvariantError(f"load of {life} is not that of its requests")

    def _best(
        self, targets: dict[Life, _Target], among: set[Life], chains: list[int], prompt_tokens: int
    ) -> Life:
        def cost(life: Life) -> tuple[int, int, Life]:
            target = targets[life]
            if self._policy == "round_robin":
                return target.last_turn, 0, life
            tokens = target.load_tokens
            if self._policy == "longest_prefix":
                tokens += prompt_tokens - self._page_size * target.prefixes.matched_pages(chains)
            # Among equals the emptier cache, so that prompts spread over all pools.
            return tokens, len(target.prefixes), life

        return min(among, key=cost)


def chain_keys(keys: PageKeys) -> list[int]:
    """One number for each prefix of a prompt: equal only where all pages up to there are."""
    chains: list[int] = []
    chain = 0
    for key in keys.tolist():
        chain = hash((chain, key))
        chains.append(chain)
    return chains
