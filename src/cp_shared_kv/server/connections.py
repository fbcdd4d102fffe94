"""How many connections are taken: so many that the links to the engine keep room beside them."""

from __future__ import annotations

import resource

RESERVED_FILES = 256
"""For links to processes, which come anew with each of their lives, and for all else."""
MOST_CONNECTIONS = 1 << 16
MOST_BACKLOG = 2048


def connection_limits() -> tuple[int, int]:
    """Connections that may be open at once, and those that may wait to be accepted.

    Both follow from this process's limit of open files. asyncio accepts all that wait in one go,
    before the first of them can be turned away.
    """
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS, MOST_BACKLOG
    free = max(16, open_files - RESERVED_FILES)
    backlog = min(MOST_BACKLOG, max(8, free // 8))
    return min(MOST_CONNECTIONS, max(8, free - 2 * backlog)), backlog
