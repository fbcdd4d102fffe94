"""Which rank owns which page of a request, as a picture in text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.text import Text

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.codecs import RECORDED
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.recording import read_messages
from cp_shared_kv.errors import CpkvError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages

PAGES_PER_LINE = 64
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "white", "bright_black")


def ownership_picture(recording: Path, limits: EngineLimits) -> Text:
    """The pages of the first request of a recording by position, each as its owner's number."""
    pages = _pages_of_first_request(recording)
    layout = CpSharedKVLayout(limits.page_size, limits.cp_size, 0)
    owners = layout.owner_for_logical_pages(pages)
    picture = Text()
    for start in range(0, len(owners), PAGES_PER_LINE):
        picture.append(f"  {start:4d} ", style="dim")
        for owner in owners[start : start + PAGES_PER_LINE].tolist():
            picture.append(format(owner, "x"), style=COLOURS[owner % len(COLOURS)])
        picture.append("\n")
    counts = np.bincount(owners, minlength=limits.cp_size)
    picture.append(
        "  " + ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts.tolist()))
    )
    return picture


def _pages_of_first_request(recording: Path) -> LogicalPages:
    for data in read_messages(recording / "prefill.messages"):
        message = RECORDED.decode(data)
        if isinstance(message, Batch) and message.requests[0].last:
            return message.requests[0].pages()
    raise CpkvError("the recording holds no finished request", value=str(recording))
