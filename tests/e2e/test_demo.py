"""`cpkv demo` as its user ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CPKV = str(Path(sys.executable).with_name("cpkv"))


@pytest.mark.e2e
@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_is_answered_and_ends_in_order(times: int) -> None:
    with subprocess.Popen(
        [CPKV, "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("prompt: this package's licence"):
                break
        for _ in range(times):  # the impatient: nothing of the cleaning up is broken off
            demo.send_signal(signal.SIGINT)
            time.sleep(0.1)
        _, said = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert said == "cpkv: stopping ...\ncpkv: interrupted\n"
