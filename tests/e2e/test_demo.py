"""`cpkv demo` as its user ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

CPKV = str(Path(sys.executable).with_name("cpkv"))


@pytest.mark.e2e
def test_ctrl_c_is_answered_and_ends_in_order() -> None:
    with subprocess.Popen(
        [CPKV, "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("prompt: this package's licence"):
                break
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert said == "cpkv: stopping ...\ncpkv: interrupted\n"
