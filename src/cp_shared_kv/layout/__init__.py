"""Arithmetic, no I/O: who owns a page, how much fits, who computes a token, what has arrived."""

from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.coverage import ExactCover
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import (
    LogicalLocs,
    LogicalPages,
    PhysicalLocs,
    PhysicalPages,
    Positions,
)
from cp_shared_kv.layout.sequence_split import SplitMode, split_tokens

__all__ = [
    "CpSharedKVLayout",
    "ExactCover",
    "KVCapacity",
    "LogicalLocs",
    "LogicalPages",
    "PhysicalLocs",
    "PhysicalPages",
    "Positions",
    "SplitMode",
    "split_tokens",
]
