"""The layout works in a process that never loads torch: planners and senders need NumPy alone."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import numpy as np
import cp_shared_kv
layout = cp_shared_kv.CpSharedKVLayout(page_size=64, cp_size=4, cp_rank=2)
physical, positions = layout.filter_owned_pages(np.arange(9, 15), np.arange(8, 14))
assert (physical.tolist(), positions.tolist()) == ([3], [10])
assert cp_shared_kv.KVCapacity(2, 64, 4).logical_tokens == 512
assert "torch" not in sys.modules, "torch was imported"
"""


def test_numpy_callers_never_load_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
