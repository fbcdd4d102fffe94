"""The arithmetic of striped ownership, written once for NumPy arrays and torch tensors.

Ids are dealt to N ranks in stripes, round and round: stripe s belongs to rank s % N. Page 0 is
padding and lies before stripe 0. Pages and locs obey the same formulas, since a loc is a page
of one token after a padding page of `page_size` tokens; so no loc is ever split into page and
offset. `padding_ids` is the number of ids that the padding page holds: 1 or page_size.

Nothing is checked here. Ids are int64 and not negative, and no array passed in is changed. What
a function has made itself it works on in place: for a million ids, fresh memory costs as much as
the arithmetic.
"""

from __future__ import annotations

from cp_shared_kv.layout.checks import Ids


def owner_of(ids: Ids, *, cp_size: int, ids_per_stripe: int, padding_ids: int) -> Ids:
    """The rank that each logical id belongs to; -1 for padding."""
    stripe = _divided(ids - padding_ids, ids_per_stripe)
    owner = _remainder(stripe, cp_size)
    # Padding lies in stripe -1. A sign spread over all bits is -1 there and 0 elsewhere.
    stripe >>= 63
    owner |= stripe
    return owner


def to_physical(ids: Ids, *, cp_size: int, ids_per_stripe: int, padding_ids: int) -> Ids:
    """The id under which each logical id's owner stores it; padding keeps its id."""
    # An id moves down by the stripes before it that other ranks own. Stripe -1, the padding,
    # has -1 - (-1 // N) = 0 of them and so needs no case of its own.
    physical = _divided(ids - padding_ids, ids_per_stripe)
    physical -= _quotient(physical, cp_size)
    physical *= -ids_per_stripe
    physical += ids
    return physical


def to_logical_pages(physical_pages: Ids, *, owner: int, cp_size: int, stripe_pages: int) -> Ids:
    """The logical page that `owner` stores in each physical page; 0 for padding."""
    # The way back: up by N-1 foreign stripes for each own stripe before the page, and by those
    # of the ranks before the owner in the page's own round.
    logical = _divided(physical_pages - 1, stripe_pages)
    logical *= cp_size - 1
    logical += owner
    logical *= stripe_pages
    logical += physical_pages
    # Padding has come out at or below 0, and nothing else has.
    return logical.clip(min=0)


# int64 division is slow everywhere, so powers of two are divided by shifts and masks.


def _divided(ids: Ids, divisor: int) -> Ids:
    """Floor division in place."""
    if divisor & (divisor - 1):
        ids //= divisor
    else:
        ids >>= divisor.bit_length() - 1
    return ids


def _quotient(ids: Ids, divisor: int) -> Ids:
    """Floor division into a new array."""
    if divisor & (divisor - 1):
        return ids // divisor
    return ids >> (divisor.bit_length() - 1)


def _remainder(ids: Ids, divisor: int) -> Ids:
    """What floor division leaves over, in a new array: 0..divisor-1, for negative ids too."""
    if divisor & (divisor - 1):
        return ids % divisor
    return ids & (divisor - 1)
