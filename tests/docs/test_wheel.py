"""What is installed: all of the package but what its tests are made of."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def test_a_wheel_holds_the_package_without_its_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("cp_shared_kv/")}
    files = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "cp_shared_kv").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    tests = {name for name in files if name.startswith("cp_shared_kv/testing/")}
    assert tests
    assert held == files - tests
