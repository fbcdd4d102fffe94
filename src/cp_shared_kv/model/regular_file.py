"""What a checkpoint consists of: files that end."""

from __future__ import annotations

import os
from pathlib import Path

from cp_shared_kv.errors import CheckpointError


def check_regular_file(path: Path) -> None:
    """Raise CheckpointError for a named pipe, a device or a directory, before it is opened.

    To open a pipe waits for a writer, and a device may never end. What is not there passes:
    opening it says so. A link counts as what it leads to.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # neither raises, as Path's can
        raise CheckpointError(
            f"{path.name} is no regular file",
            value=path,
            allowed="a file, or a link to one",
            change="copy the file again",
        )
