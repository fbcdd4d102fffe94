"""The `cpkv` command. One file a subcommand."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point of the `cpkv` script."""
    try:
        from cp_shared_kv.cli.app import run
    except ModuleNotFoundError as error:
        sys.exit(
            f"cpkv needs {error.name}, which is not installed; "
            "install the engine: pip install 'cp-shared-kv[engine]'"
        )
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)  # while importing; a running command is stopped in app.py
    sys.exit(run())
