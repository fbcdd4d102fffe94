"""Decode's look at the pages of a covered room: are they what the ranks have sent?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.transfer.decode_session import DecodeSession

Checksums = Callable[[PhysicalPages], npt.NDArray[np.int64]]


def damaged_page(session: DecodeSession, checksums: Checksums) -> str | None:
    """The first page that differs from what its rank has sent, in words; None if all agree.

    `checksums` gives those of this worker's own pages.
    """
    for sent in session.claims():
        positions = sent.position_array()
        if not len(positions):
            continue
        claimed = sent.checksum_array()
        if claimed is None:
            return f"CP rank {sent.rank} sent pages without checksums"
        pages = session.reservation.destinations(positions)
        found = checksums(pages)
        differ = np.flatnonzero(claimed != found)
        if len(differ):
            at = int(differ[0])
            position = session.reservation.first_position + int(positions[at])
            return (
                f"KV page damaged on its way from CP rank {sent.rank}: position {position} of the "
                f"request, physical page {pages[at]} at decode, has checksum "
                f"{int(found[at]):#010x}, sent with {int(claimed[at]):#010x}"
            )
    return None
