"""Tests against SGLang itself, on a CPU. They skip where it is not installed: `make test-sglang`.

CPKV_SGLANG_SITE names a folder with another unpacked SGLang, to be tested in the same environment.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SITE = os.environ.get("CPKV_SGLANG_SITE", "")
if SITE:
    sys.path.insert(0, SITE)

INSTALLED = importlib.util.find_spec("sglang") is not None
# Where there is none, nothing else may be imported: stand-ins would be found by other tests.
collect_ignore_glob = [] if INSTALLED else ["test_[!i]*.py"]
if INSTALLED:
    sys.path.insert(0, str(HERE))
    # SGLang's Triton kernels, which read this when they are defined.
    os.environ["TRITON_INTERPRET"] = "1"
    # For the processes that tests start.
    folders = [str(HERE), SITE, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    import cpu_stand_ins  # noqa: F401 (from here on SGLang can be imported)


@pytest.fixture(scope="session")
def sglang_on_a_gpu_host() -> None:
    """SGLang's argument checks, which ask for a Hopper GPU, answered as on one."""
    import torch

    torch.cuda.get_device_capability = lambda *_args, **_kwargs: (9, 0)


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    """A directory with the config of a small DSA model: all that parsing arguments looks at."""
    (tmp_path / "config.json").write_text((HERE / "small_dsa_config.json").read_text())
    return str(tmp_path)


@pytest.fixture(scope="session")
def plugins_loaded() -> None:
    """SGLang's plugins as a front-end process loads them: ours through its entry point."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    assert HookRegistry._patched, "the entry point was not found; install cp-shared-kv here"
