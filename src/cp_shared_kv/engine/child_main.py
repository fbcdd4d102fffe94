"""Entry point of the engine's processes: `python -m ... RUN_FILE LIFE [RANK]`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from cp_shared_kv.engine.child import SupervisorLink, begin, run_child
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.run_spec import RunSpec


def _run(spec: RunSpec, life: Life, rank: int | None, link: SupervisorLink) -> None:
    # Imported here, so that the controller does not pay for torch.
    if rank is not None:
        from cp_shared_kv.engine.worker import run as run_rank

        run_rank(spec, life, rank, link)
    elif life.role == "prefill":
        from cp_shared_kv.engine.prefill_process import run as run_prefill

        run_prefill(spec, life, link)
    elif life.role == "decode":
        from cp_shared_kv.engine.decode_process import run as run_decode

        run_decode(spec, life, link)
    else:
        raise SystemExit(f"no process of the engine: {life}")


def main(arguments: list[str]) -> int:
    """Entry point of a rank, controller or decode process."""
    spec = RunSpec.load(Path(arguments[0]))
    life = Life.parse(arguments[1])
    rank = int(arguments[2]) if len(arguments) > 2 else None
    begin(spec, life.unit if rank is None else f"{life.unit}/rank-{rank}")
    identity = life.identity if rank is None else life.rank_identity(rank)
    return run_child(spec, identity, partial(_run, spec, life, rank))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
