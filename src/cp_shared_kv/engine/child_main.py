"""Entry point of the engine's processes: `python -m ... ROLE RUN_FILE [INDEX]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from cp_shared_kv.engine.child import die_with_supervisor, run_child, set_up_logging
from cp_shared_kv.engine.run_spec import RunSpec


def _runner(role: str) -> Callable[[RunSpec, int], None]:
    # Imported here, so that the controller does not pay for torch.
    if role == "rank":
        from cp_shared_kv.engine.worker import run
    elif role == "prefill":
        from cp_shared_kv.engine.prefill_process import run
    elif role == "decode":
        from cp_shared_kv.engine.decode_process import run
    else:
        raise SystemExit(f"unknown role {role!r}")
    return run


def main(arguments: list[str]) -> int:
    """Entry point of a rank, controller or decode process."""
    role, run_file = arguments[0], arguments[1]
    index = int(arguments[2]) if len(arguments) > 2 else 0
    spec = RunSpec.load(Path(run_file))
    die_with_supervisor(spec)
    name = f"{role}-{index}"
    set_up_logging(name, spec.config["log_level"])
    return run_child(name, spec, lambda: _runner(role)(spec, index))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
