"""Which rank of a CP group stores a logical page, and where in that rank's buffers it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout.checks import (
    INT64_MAX,
    Ids,
    admit,
    as_int64,
    check_range,
    check_rank,
    check_whole_number,
    check_whole_stripes,
)
from cp_shared_kv.layout.pages import (
    LogicalLocs,
    LogicalPages,
    PhysicalLocs,
    PhysicalPages,
    Positions,
)
from cp_shared_kv.layout.stripes import owner_of, to_logical_pages, to_physical

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CpSharedKVLayout:
    """The map between the group's logical pages and the physical pages of its ranks.

    With N = `cp_size` and B = `stripe_pages`, page p >= 1 belongs to rank ((p-1) // B) % N and
    is that rank's page ((p-1) // (B*N)) * B + (p-1) % B + 1. Page 0 is padding: owner -1,
    physical page 0. With `physical_pages` = P the map is a bijection between 1..N*P and the
    pairs of an owner and one of its pages 1..P. B = 1 is the page-interleaved layout.

    Every method takes integers of any shape in a NumPy array or a torch tensor and returns
    int64 (or bool) of the same shape, kind and device. It is local arithmetic: any rank may
    call it at any time. In host memory a negative id raises LayoutError, and so does one past
    the pool where `physical_pages` is given. In accelerator memory nothing is checked, the host
    never waits, and ids below 1 are padding.
    """

    page_size: int
    cp_size: int
    cp_rank: int
    stripe_pages: int = 1
    physical_pages: int | None = None

    def __post_init__(self) -> None:
        check_whole_number("page_size", self.page_size, at_least=1)
        check_whole_number("cp_size", self.cp_size, at_least=1)
        check_rank("cp_rank", self.cp_rank, self.cp_size)
        check_whole_number("stripe_pages", self.stripe_pages, at_least=1)
        if self.physical_pages is not None:
            check_whole_stripes(self.physical_pages, self.stripe_pages)
        last_page = self.cp_size * (self.physical_pages or self.stripe_pages)
        last_loc = (last_page + 1) * self.page_size - 1
        if last_loc > INT64_MAX:
            raise LayoutError(
                "the layout's last loc does not fit int64",
                value=last_loc,
                allowed=f"<= {INT64_MAX}",
                change="lower page_size, cp_size, stripe_pages or physical_pages",
            )

    @property
    def logical_pages(self) -> int:
        """Pages in the pooled space, N*P, padding not counted. Needs `physical_pages`."""
        if self.physical_pages is None:
            raise LayoutError(
                "a layout without physical_pages has no size", change="construct it with them"
            )
        return self.cp_size * self.physical_pages

    @overload
    def owner_for_logical_pages(self, logical_pages: LogicalPages) -> npt.NDArray[np.int64]: ...
    @overload
    def owner_for_logical_pages(self, logical_pages: torch.Tensor) -> torch.Tensor: ...
    def owner_for_logical_pages(self, logical_pages: Any) -> Any:
        """The rank that stores each page, 0..N-1; -1 for padding."""
        return self._owner(self._pages(logical_pages))

    @overload
    def owned_pages_mask(self, logical_pages: LogicalPages) -> npt.NDArray[np.bool_]: ...
    @overload
    def owned_pages_mask(self, logical_pages: torch.Tensor) -> torch.Tensor: ...
    def owned_pages_mask(self, logical_pages: Any) -> Any:
        """True for each page that this rank stores; padding is nobody's."""
        return self._owner(self._pages(logical_pages)) == self.cp_rank

    @overload
    def owned_by_this_rank(self, logical_locs: LogicalLocs) -> npt.NDArray[np.bool_]: ...
    @overload
    def owned_by_this_rank(self, logical_locs: torch.Tensor) -> torch.Tensor: ...
    def owned_by_this_rank(self, logical_locs: Any) -> Any:
        """True for each loc whose page this rank stores; padding is nobody's."""
        return self._owner(self._locs(logical_locs), self.page_size) == self.cp_rank

    @overload
    def logical_pages_to_physical(self, logical_pages: LogicalPages) -> PhysicalPages: ...
    @overload
    def logical_pages_to_physical(self, logical_pages: torch.Tensor) -> torch.Tensor: ...
    def logical_pages_to_physical(self, logical_pages: Any) -> Any:
        """Where each page lies in its owner's buffers, 1..P; 0 for padding."""
        return self._physical(self._pages(logical_pages))

    @overload
    def logical_locs_to_physical(self, logical_locs: LogicalLocs) -> PhysicalLocs: ...
    @overload
    def logical_locs_to_physical(self, logical_locs: torch.Tensor) -> torch.Tensor: ...
    def logical_locs_to_physical(self, logical_locs: Any) -> Any:
        """Where each loc lies in its owner's buffers; the locs of page 0 keep their place."""
        return self._physical(self._locs(logical_locs), self.page_size)

    @overload
    def filter_owned_pages(
        self, logical_pages: LogicalPages, request_page_positions: Positions
    ) -> tuple[PhysicalPages, Positions]: ...
    @overload
    def filter_owned_pages(
        self, logical_pages: torch.Tensor, request_page_positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def filter_owned_pages(
        self, logical_pages: Any, request_page_positions: Any
    ) -> tuple[Any, Any]:
        """The physical pages and the request positions of the pages that this rank stores.

        Takes two 1-D arrays of one kind and length, else LayoutError; the results keep the
        order. How many pages are owned is data, so on an accelerator this method, unlike the
        others, waits for the device.
        """
        pages = self._pages(logical_pages)
        positions = as_int64("position", request_page_positions)
        check_range("position", positions, last=None)
        of_one_kind = isinstance(pages, np.ndarray) == isinstance(positions, np.ndarray)
        if not of_one_kind or pages.ndim != 1 or pages.shape != positions.shape:
            raise LayoutError(
                "logical_pages and request_page_positions do not go together",
                value=f"{type(pages).__name__} of shape {tuple(pages.shape)} and "
                f"{type(positions).__name__} of shape {tuple(positions.shape)}",
                allowed="two 1-D arrays of one kind and length",
                change="pass one position for each page",
            )
        owned = self._owner(pages) == self.cp_rank
        return self._physical(pages[owned]), positions[owned]

    @overload
    def physical_pages_to_logical(
        self, physical_pages: PhysicalPages, owner: int | None = None
    ) -> LogicalPages: ...
    @overload
    def physical_pages_to_logical(
        self, physical_pages: torch.Tensor, owner: int | None = None
    ) -> torch.Tensor: ...
    def physical_pages_to_logical(self, physical_pages: Any, owner: int | None = None) -> Any:
        """The logical page that rank `owner` (None: this rank) keeps in each physical page.

        The inverse of `logical_pages_to_physical`; physical page 0 is logical page 0.
        """
        owner = self.cp_rank if owner is None else owner
        check_rank("owner", owner, self.cp_size)
        # A layout of no given size ends where its logical pages would leave int64.
        last = self.physical_pages or INT64_MAX // self.cp_size - self.stripe_pages
        return to_logical_pages(
            admit("physical page", physical_pages, last=last),
            owner=owner,
            cp_size=self.cp_size,
            stripe_pages=self.stripe_pages,
        )

    def _pages(self, ids: Ids) -> Ids:
        last = None if self.physical_pages is None else self.logical_pages
        return admit("logical page", ids, last=last)

    def _locs(self, ids: Ids) -> Ids:
        size = None if self.physical_pages is None else (self.logical_pages + 1) * self.page_size
        return admit("logical loc", ids, last=None if size is None else size - 1)

    def _owner(self, ids: Ids, ids_per_page: int = 1) -> Ids:
        return owner_of(
            ids,
            cp_size=self.cp_size,
            ids_per_stripe=self.stripe_pages * ids_per_page,
            padding_ids=ids_per_page,
        )

    def _physical(self, ids: Ids, ids_per_page: int = 1) -> Ids:
        return to_physical(
            ids,
            cp_size=self.cp_size,
            ids_per_stripe=self.stripe_pages * ids_per_page,
            padding_ids=ids_per_page,
        )
