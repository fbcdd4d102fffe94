"""Push or pull, whichever is faster for a batch."""

from __future__ import annotations

import torch

from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.reads.peer_pull import PeerPullReader
from cp_shared_kv.reads.peer_push import PeerPushReader
from cp_shared_kv.reads.plan import PagesByOwner, ReadPlan
from cp_shared_kv.reads.read_costs import push_is_faster


class PeerReader:
    """Pulls short prefixes, and parts of any, and pushes long ones. The choice follows from the
    plan, which all ranks have alike."""

    def __init__(self, pull: PeerPullReader, push: PeerPushReader) -> None:
        self._pull, self._push = pull, push
        self._plan: ReadPlan | None = None

    @property
    def pages_read(self) -> int:
        return self._pull.pages_read + self._push.pages_read

    @property
    def bytes_read(self) -> int:
        return self._pull.bytes_read + self._push.bytes_read

    def begin(self, plan: ReadPlan) -> None:
        """Collective, on the current stream."""
        self._plan = plan
        self._pull.begin(plan)
        self._push.begin(plan)

    def read(self, kind: PageKind, layer: int, pages: PagesByOwner, scratch: torch.Tensor) -> None:
        """Collective where all of a long prefix is read."""
        assert self._plan is not None, "begin comes first"
        remote_bytes = pages.most_remote_pages * scratch.shape[1]
        pushed = self._plan.is_whole(pages) and push_is_faster(remote_bytes)
        (self._push if pushed else self._pull).read(kind, layer, pages, scratch)
