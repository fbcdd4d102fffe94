"""How many tokens a memory budget holds: on one rank (physical) and in the group (logical)."""

from __future__ import annotations

from dataclasses import dataclass

from cp_shared_kv.errors import CapacityError
from cp_shared_kv.layout.checks import check_whole_number, check_whole_stripes


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """The size of a shared KV pool: `physical_pages` on each of `cp_size` ranks.

    The padding page that every rank keeps besides is in none of the figures. LayoutError for
    settings that are no whole numbers, or for a pool that is no whole number of stripes.
    """

    physical_pages: int
    page_size: int
    cp_size: int
    stripe_pages: int = 1

    def __post_init__(self) -> None:
        check_whole_number("page_size", self.page_size, at_least=1)
        check_whole_number("cp_size", self.cp_size, at_least=1)
        check_whole_stripes(self.physical_pages, self.stripe_pages)

    @classmethod
    def from_budget(
        cls,
        budget_bytes: int,
        page_bytes: int,
        page_size: int,
        cp_size: int,
        stripe_pages: int = 1,
    ) -> KVCapacity:
        """The largest pool within `budget_bytes` a rank, its padding page paid for.

        `budget_bytes` is what weights and scratch leave; `page_bytes` is one page of latent KV
        and index K over all layers. CapacityError when not even one stripe fits.
        """
        check_whole_number("budget_bytes", budget_bytes, at_least=0)
        check_whole_number("page_bytes", page_bytes, at_least=1)
        check_whole_number("stripe_pages", stripe_pages, at_least=1)
        pages = budget_bytes // page_bytes - 1
        if pages < stripe_pages:
            raise CapacityError(
                "the KV budget of a rank holds no stripe of pages",
                value=f"{budget_bytes} bytes",
                allowed=f">= {(stripe_pages + 1) * page_bytes} bytes "
                f"(stripe_pages={stripe_pages} and the padding page)",
                change="raise the budget, or lower the scratch limit or stripe_pages",
            )
        return cls(pages - pages % stripe_pages, page_size, cp_size, stripe_pages)

    @classmethod
    def from_tokens(
        cls, physical_tokens: int, page_size: int, cp_size: int, stripe_pages: int = 1
    ) -> KVCapacity:
        """The largest pool of at most `physical_tokens` a rank.

        CapacityError when they do not fill one stripe.
        """
        check_whole_number("physical_tokens", physical_tokens, at_least=0)
        check_whole_number("page_size", page_size, at_least=1)
        check_whole_number("stripe_pages", stripe_pages, at_least=1)
        pages = physical_tokens // page_size
        if pages < stripe_pages:
            raise CapacityError(
                "the physical tokens of a rank fill no stripe of pages",
                value=physical_tokens,
                allowed=f">= {stripe_pages * page_size} tokens "
                f"(stripe_pages={stripe_pages} x page_size={page_size})",
                change="raise the token limit, or lower stripe_pages or page_size",
            )
        return cls(pages - pages % stripe_pages, page_size, cp_size, stripe_pages)

    @property
    def physical_tokens(self) -> int:
        """Tokens that one rank stores."""
        return self.physical_pages * self.page_size

    @property
    def logical_pages(self) -> int:
        """Pages that the group stores: what the allocator hands out."""
        return self.physical_pages * self.cp_size

    @property
    def logical_tokens(self) -> int:
        """Tokens that the group stores: what a scheduler plans with."""
        return self.physical_tokens * self.cp_size
