"""Logical pages that are free: draw, free, count. Balance between owners is a preference only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import CapacityError, InvariantError, LayoutError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.checks import as_int64, check_range
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages

Int64s = npt.NDArray[np.int64]


class PageAllocator:
    """Hands out the logical pages 1..N*P of one pool and takes them back.

    Every free page serves: a draw fails only when fewer pages are free than it asks for.
    Which pages it takes is policy, so that reads and transfers load all ranks alike.
    Single-threaded, local; the prefill controller owns it.

    Invariant, proved by `check_invariants`: each owner's count of free pages is true.
    """

    def __init__(self, capacity: KVCapacity) -> None:
        self._owners = capacity.cp_size
        self._pages_per_owner = capacity.physical_pages
        self._stripe_pages = capacity.stripe_pages
        self.total_pages = capacity.logical_pages
        # A slot is a page's place in the order (owner, physical page). Pages that follow each
        # other in slots of one owner follow each other in its buffers too.
        layout = CpSharedKVLayout(
            capacity.page_size, self._owners, 0, self._stripe_pages, self._pages_per_owner
        )
        all_pages = LogicalPages(np.arange(self.total_pages + 1))
        owner = layout.owner_for_logical_pages(all_pages)
        physical: PhysicalPages = layout.logical_pages_to_physical(all_pages)
        self._slot_of_page: Int64s = owner * self._pages_per_owner + physical - 1
        self._page_of_slot: Int64s = np.argsort(self._slot_of_page[1:]) + 1
        self._is_free = np.ones((self._owners, self._pages_per_owner), np.bool_)
        self._free_count: Int64s = np.full(self._owners, self._pages_per_owner, np.int64)
        self.available_pages = self.total_pages

    def free_pages_per_owner(self) -> Int64s:
        """How many pages of each owner are free, i64[N]."""
        return self._free_count.copy()

    def free_pages(self) -> LogicalPages:
        """All free pages, ascending."""
        return LogicalPages(np.sort(self._page_of_slot[np.flatnonzero(self._is_free)]))

    def free_by_place(self) -> npt.NDArray[np.bool_]:
        """Whether the page is free, bool[N, P]: by owner and physical page, the first of them 1."""
        return self._is_free.copy()

    def by_place(self, logical_pages: LogicalPages) -> npt.NDArray[np.bool_]:
        """bool[N, P] as `free_by_place`: the places of these pages. LayoutError as in `free`."""
        places = np.zeros(self._is_free.shape, np.bool_)
        places.reshape(-1)[self._slots_of(logical_pages)] = True
        return places

    def draw(self, page_count: int, request_pages: LogicalPages | None = None) -> LogicalPages:
        """Take `page_count` free pages to follow `request_pages`, in the order of use.

        `request_pages` are the pages that the request already has, its cached prefix included;
        None or empty for a new request, which starts at the owner with the most free pages.
        Each page goes to the owner that has the least of the request so far, counted in
        stripes, and ties go round the owners in one cyclic order that begins with the request's
        first page. Where enough is free that is p + 1 within a stripe and then a page of the
        next owner; where it is not, the next draws make up for it. Of one owner's pages those
        that follow the request's last page there come first, then the lowest, ascending.

        Raises CapacityError, and draws nothing, when fewer pages are free; LayoutError when
        `request_pages` holds anything but pages of this pool.
        """
        if page_count < 0:
            raise LayoutError("a draw of fewer than no pages", value=page_count, allowed=">= 0")
        if page_count > self.available_pages:
            raise CapacityError(
                "more pages were drawn than are free",
                value=page_count,
                allowed=f"at most {self.available_pages}",
                change="evict cached prefixes or wait until rooms are released",
            )
        held_slots = self._slots_of(request_pages) if request_pages is not None else _NONE
        if page_count == 0:
            return LogicalPages(_NONE)

        held = np.bincount(held_slots // self._pages_per_owner, minlength=self._owners)
        if len(held_slots):
            first_owner = int(held_slots[0]) // self._pages_per_owner
        else:
            first_owner = int(self._free_count.argmax())
        owners = (first_owner + np.arange(self._owners)) % self._owners
        quotas = level_quotas(
            page_count, held[owners], self._free_count[owners], self._stripe_pages
        )
        resume_at = self._resume_points(held_slots)
        slots_by_turn = [
            self._find_free(owner, quota, resume_at[owner])
            for owner, quota in zip(owners.tolist(), quotas.tolist(), strict=True)
        ]
        slots = interleave_stripes(slots_by_turn, held[owners], self._stripe_pages)
        self._is_free.reshape(-1)[slots] = False
        self._free_count[owners] -= quotas
        self.available_pages -= page_count
        return LogicalPages(self._page_of_slot[slots])

    def free(self, logical_pages: LogicalPages) -> None:
        """Take pages back, in any order.

        Raises LayoutError for ids that are no pages of this pool (padding page 0 is none), and
        InvariantError for a page that is free already or comes twice; nothing is freed then.
        """
        slots = self._slots_of(logical_pages)
        already_free = self._is_free.reshape(-1)[slots]
        if already_free.any():
            self._refuse_double_free(int(slots[already_free.argmax()]), "it is free already")
        in_order = np.sort(slots)
        repeated = in_order[1:] == in_order[:-1]
        if repeated.any():
            self._refuse_double_free(int(in_order[repeated.argmax()]), "it is twice in one call")
        self._is_free.reshape(-1)[slots] = True
        self._free_count += np.bincount(slots // self._pages_per_owner, minlength=self._owners)
        self.available_pages += len(slots)

    def check_invariants(self) -> None:
        """Raises InvariantError when an owner's free pages are miscounted."""
        counted = self._is_free.sum(axis=1)
        if counted.tolist() != self._free_count.tolist() or counted.sum() != self.available_pages:
            raise InvariantError(
                "allocator: free pages are miscounted",
                value=f"{self._free_count.tolist()}, together {self.available_pages}",
                allowed=str(counted.tolist()),
            )

    def _slots_of(self, logical_pages: LogicalPages) -> Int64s:
        pages = as_int64("logical page", logical_pages)
        check_range("logical page", pages, last=self.total_pages)
        if pages.ndim != 1 or not pages.all():
            raise LayoutError(
                "logical pages cannot be drawn or freed",
                value="padding page 0" if pages.ndim == 1 else f"an array {list(pages.shape)}",
                allowed=f"a one-dimensional array of pages 1..{self.total_pages}",
            )
        return self._slot_of_page[pages]

    def _refuse_double_free(self, slot: int, reason: str) -> None:
        raise InvariantError(
            "double free of logical page",
            value=f"{self._page_of_slot[slot]} ({reason})",
            allowed="each drawn page once",
        )

    def _resume_points(self, held_slots: Int64s) -> list[int]:
        """For each owner: where in its row the request's last page there ends, else 0."""
        # A request in cyclic order has a page of every owner among the last N * B.
        last = held_slots[-self._owners * self._stripe_pages :]
        owner, place = np.divmod(last, self._pages_per_owner)
        points = np.zeros(self._owners, np.int64)
        points[owner] = place + 1  # of several pages of one owner the last one stays
        return points.tolist()

    def _find_free(self, owner: int, count: int, start: int) -> Int64s:
        """Slots of the first `count` free pages in an owner's row from `start` on, going round."""
        row, free = self._is_free[owner], int(self._free_count[owner])
        found = _first_true(row[start:], count, free) + start
        if len(found) < count:
            before_start = _first_true(row[:start], count - len(found), free)
            found = np.concatenate([found, before_start])
        return found + owner * self._pages_per_owner


def level_quotas(page_count: int, held: Int64s, free: Int64s, stripe_pages: int) -> Int64s:
    """How many of `page_count` pages to draw from each owner, so that a request lies level.

    All arrays are i64[N] with the owners in the request's cyclic order: `held` is what the
    request has of each, `free` what each could give. Pages are dealt like water: to the owner
    with the fewest whole stripes, the earliest in order among equals, as long as it has a page.
    `page_count` must not exceed the sum of `free`. Returns i64[N], which sums to `page_count`.
    """
    # Filling every owner up to x pages takes sum(clip(x - held, 0, free)): straight lines
    # between corners. The last corner that can be paid for, and the line after it, give x.
    corners = np.sort(np.concatenate([held, held + free]))
    cost = _between_0_and(free, corners[:, None] - held).sum(axis=1)
    corner = int(np.searchsorted(cost, page_count, side="right")) - 1
    level = int(corners[corner])
    filling = int(np.count_nonzero((held <= level) & (level < held + free)))
    if filling:
        level += (page_count - int(cost[corner])) // filling
    # Whole stripes up to that level for all; what is left goes to the next stripe in order.
    level -= level % stripe_pages
    quotas = _between_0_and(free, level - held)
    next_stripe = _between_0_and(free, level + stripe_pages - held) - quotas
    taken_before = np.cumsum(next_stripe) - next_stripe
    return quotas + _between_0_and(next_stripe, page_count - quotas.sum() - taken_before)


def _between_0_and(upper: Int64s, values: Int64s) -> Int64s:
    # What np.clip does, which for a handful of owners takes four times as long.
    return np.minimum(np.maximum(values, 0), upper)


def interleave_stripes(slots_by_turn: list[Int64s], held: Int64s, stripe_pages: int) -> Int64s:
    """Put each owner's pages into the order of use: stripe after stripe, owner after owner.

    `slots_by_turn` and `held` i64[N] have the owners in the request's cyclic order. An owner's
    first page continues the stripe in which its `held` pages end.
    """
    drawing = [turn for turn, slots in enumerate(slots_by_turn) if len(slots)]
    base = int(held[drawing].min()) // stripe_pages * stripe_pages
    spans = [(int(held[turn]) - base, slots_by_turn[turn]) for turn in drawing]
    width = max(start + len(slots) for start, slots in spans)
    width += -width % stripe_pages
    table = np.full((len(slots_by_turn), width), -1, np.int64)
    for turn, (start, slots) in zip(drawing, spans, strict=True):
        table[turn, start : start + len(slots)] = slots
    in_order = table.reshape(len(table), -1, stripe_pages).transpose(1, 0, 2).reshape(-1)
    return in_order[in_order >= 0]


def _first_true(row: npt.NDArray[np.bool_], count: int, true_count: int) -> Int64s:
    """The places of the first `count` true values of a row; fewer when there are fewer.

    `true_count` bounds the true values in the row. It only guesses how far to look.
    """
    window = 64 + 2 * count * len(row) // max(true_count, 1)
    while True:
        found = row[:window].nonzero()[0]
        if len(found) >= count or window >= len(row):
            return found[:count]
        window *= 4


_NONE: Int64s = np.empty(0, np.int64)
