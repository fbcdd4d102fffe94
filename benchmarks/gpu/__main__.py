"""`python -m benchmarks.gpu [name ...]`: run the named measurements on GPUs, or all of them."""

from __future__ import annotations

import sys

from benchmarks.__main__ import main
from benchmarks.gpu import RANKS
from cp_shared_kv.kernels.needs import missing_for_gpus

if __name__ == "__main__":
    missing = missing_for_gpus(RANKS)
    if missing is not None:
        sys.exit(f"benchmarks.gpu: {missing}")
    sys.exit(main(package=".gpu", description=__doc__))
