"""Which group takes a request: the engine's own router, with a decode worker for each group."""

from __future__ import annotations

from cp_shared_kv.engine.config_values import RouterPolicy
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.router import Route, Router
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.planner.simulated_request import SimulatedRequest

_DECODE_PAGES = 1  # a group sends to its own decode worker, so nothing is chosen by what one holds


class Front:
    """Routes requests over `groups` groups; with one group there is nothing to choose."""

    def __init__(self, policy: RouterPolicy, groups: int, capacity: KVCapacity) -> None:
        self._router = Router(
            policy,
            capacity.page_size,
            group_pages=capacity.logical_pages,
            decode_pages=_DECODE_PAGES,
        )
        self._routes = [
            Route(Life("prefill", group, 1), Life("decode", group, 1)) for group in range(groups)
        ]
        for route in self._routes:
            self._router.paired(route.group, route.decode)

    def choose(self, request: SimulatedRequest) -> int:
        """The group that takes it, whose load it counts for from now on."""
        if len(self._routes) == 1:
            return 0
        route = self._router.choose(request.page_keys, request.prompt_tokens, self._routes)
        assert route is not None
        self._router.book(
            request.room,
            route,
            request.page_keys,
            prompt_tokens=request.prompt_tokens,
            max_tokens=max(1, request.output_tokens),
        )
        return route.group.index

    def prefilled(self, request: SimulatedRequest) -> None:
        """Its prompt is computed."""
        self._router.prefilled(request.room)

    def answered(self, request: SimulatedRequest) -> None:
        """It is over."""
        self._router.ended(request.room)

    def check_invariants(self) -> None:
        """InvariantError unless the loads are those of the open requests."""
        self._router.check_invariants()
