"""What a machine lacks for the work on GPUs, in one sentence.

`python -m cp_shared_kv.kernels.needs 2` prints it and exits with 1, or with 0 where nothing is
missing.
"""

from __future__ import annotations

import importlib.util
import sys

import torch


def missing_for_gpus(count: int) -> str | None:
    """Why tests and benchmarks that need so many NVIDIA GPUs cannot run here; None if they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build for CPUs: install one for CUDA"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU: torch finds no driver or no device"
    if torch.cuda.device_count() < count:
        return f"{count} NVIDIA GPUs are needed, and torch sees {torch.cuda.device_count()}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'cp-shared-kv[gpu]'"
    return None


if __name__ == "__main__":
    missing = missing_for_gpus(int(sys.argv[1]))
    if missing is not None:
        sys.exit(missing)
