"""Room for open files: connections of other hosts are some, also those of strangers."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger("cp_shared_kv")


def raise_open_files_limit() -> int:
    """Raise this process's soft limit of open files to the hard one; returns what holds now.

    What the system refuses is logged, and the limit stays as it is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    logger.debug("the limit of open files is raised from %d to %d", soft, hard)
    return hard
