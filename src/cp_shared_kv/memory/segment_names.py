"""Where shared-memory segments lie and what their names begin with; for those without torch too."""

from __future__ import annotations

SHARED_MEMORY_DIRECTORY = "/dev/shm"  # noqa: S108 (files are made exclusively, mode 0600)
SEGMENT_PREFIX = "cpkv-"
