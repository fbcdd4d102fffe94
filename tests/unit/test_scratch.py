"""Scratch grows by need, is kept, and ends at its limit."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.errors import CapacityError
from cp_shared_kv.reads.scratch import Scratch


def test_it_grows_by_need_and_is_reused_for_less() -> None:
    scratch = Scratch(limit_bytes=100)
    assert scratch.bytes_in_use == 0
    first = scratch.take("pages", 40)
    assert (first.dtype, first.shape, scratch.bytes_in_use) == (torch.uint8, (40,), 40)
    again = scratch.take("pages", 10)
    assert (len(again), again.data_ptr(), scratch.bytes_in_use) == (10, first.data_ptr(), 40)
    assert len(scratch.take("pages", 60)) == 60
    assert len(scratch.take("rows", 40)) == 40
    assert scratch.bytes_in_use == 100


def test_past_the_limit_it_says_how_many_bytes_and_keeps_what_it_has() -> None:
    scratch = Scratch(limit_bytes=100)
    scratch.take("rows", 40)
    kept = scratch.take("pages", 60)
    with pytest.raises(
        CapacityError, match="scratch for pages: 61 bytes beside the 40 in use; allowed: 100 bytes"
    ):
        scratch.take("pages", 61)
    assert scratch.bytes_in_use == 100
    assert scratch.take("pages", 60).data_ptr() == kept.data_ptr()


def test_nothing_can_be_taken_without_a_limit_to_spare() -> None:
    scratch = Scratch(limit_bytes=0)
    assert len(scratch.take("pages", 0)) == 0
    with pytest.raises(CapacityError):
        scratch.take("pages", 1)


def test_what_is_made_in_inference_mode_is_writable_outside_it() -> None:
    scratch = Scratch(limit_bytes=8)
    with torch.inference_mode():
        scratch.take("pages", 8)
    scratch.take("pages", 8).fill_(1)
