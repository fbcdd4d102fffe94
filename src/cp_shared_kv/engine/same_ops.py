"""All ranks of a group compute attention in the same way, or none starts."""

from __future__ import annotations

import hashlib

import torch

from cp_shared_kv.errors import StartupError
from cp_shared_kv.reads.group import CPGroup


def require_same_ops(group: CPGroup, name: str) -> None:
    """Compare what the ranks call their ops. Collective; StartupError on every rank if two differ.

    With --attention-ops auto each rank tries the libraries for itself. Where one of them fails on
    one GPU alone, that rank's rows would have other bits than its peers'.
    """
    digest = hashlib.sha256(name.encode()).digest()
    told = torch.empty((group.cp_size, len(digest)), dtype=torch.uint8)
    group.all_gather_bytes(torch.frombuffer(bytearray(digest), dtype=torch.uint8), told)
    if not torch.equal(told, told[:1].expand_as(told)):
        raise StartupError(
            "the ranks of a group would compute attention in different ways",
            value=f"here by {name}",
            change="see 'attention by' of each rank in the log; --attention-ops triton or torch is "
            "the same on all",
        )
