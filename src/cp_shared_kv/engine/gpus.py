"""The GPUs of this machine, looked at from a process of its own.

To look takes a CUDA context on each, which would stay in the supervisor's process and cost memory
of every GPU as long as the run lasts. `python -m cp_shared_kv.engine.gpus` prints what it sees.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import msgspec

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.errors import ConfigError, StartupError
from cp_shared_kv.kernels import ALIGNMENT_BYTES
from cp_shared_kv.memory.gpu_writes import check_kernels
from cp_shared_kv.memory.page_format import PAGE_KINDS
from cp_shared_kv.memory.pool import KVPoolSpec
from cp_shared_kv.reads.selected_rows import check_rows

LOOK_SECONDS = 120
NEEDED_CAPABILITY = (8, 0)
"""Compute capability of Ampere: bf16 matrix products."""


class GPU(msgspec.Struct, frozen=True):
    """One GPU as torch sees it, by its index."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


class _Sight(msgspec.Struct, frozen=True):
    gpus: list[GPU]
    missing: str | None = None
    change: str | None = None


def look_at_gpus() -> list[GPU]:
    """The GPUs that torch sees here; StartupError, with what to install or to change, if none."""
    command = [sys.executable, "-m", "cp_shared_kv.engine.gpus"]
    try:
        seen = subprocess.run(command, capture_output=True, timeout=LOOK_SECONDS, check=False)  # noqa: S603  (our own module)
    except subprocess.TimeoutExpired as error:
        raise StartupError(
            "the GPUs do not answer", value=f"{LOOK_SECONDS} s", change="look at nvidia-smi"
        ) from error
    if seen.returncode:
        last = seen.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise StartupError(
            f"cannot look at the GPUs: {'; '.join(last)}", change="look at nvidia-smi"
        )
    sight = msgspec.json.decode(seen.stdout, type=_Sight)
    if sight.missing is not None:
        raise StartupError(f"--device cuda: {sight.missing}", change=sight.change)
    return sight.gpus


def check_gpus(config: EngineConfig, spec: KVPoolSpec, gpus: list[GPU]) -> None:
    """Refuse what these GPUs cannot run, before any process starts."""
    if len(gpus) < config.cp_size and not config.ranks_share_gpus:
        raise ConfigError(
            "each rank of a group needs a GPU of its own",
            value=f"--attention-context-parallel-size {config.cp_size}, and torch sees "
            f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}",
            change="lower --attention-context-parallel-size, or show more GPUs in "
            "CUDA_VISIBLE_DEVICES; to try things out, slowly: --ranks-share-gpus",
        )
    old = [gpu for gpu in gpus if gpu.capability < NEEDED_CAPABILITY]
    if old:
        raise ConfigError(
            "a GPU is too old for the kernels",
            value=f"{old[0].name}, compute capability {old[0].capability[0]}."
            f"{old[0].capability[1]}",
            allowed="8.0 or more",
            change="hide it with CUDA_VISIBLE_DEVICES",
        )
    check_kernels(spec)
    if config.resolved_kv_read == "sparse" or config.kv_scratch_tokens is not None:
        check_rows(spec.latent)
    for kind in PAGE_KINDS:
        if spec.layers(kind) and spec.page_bytes(kind) % ALIGNMENT_BYTES:
            raise ConfigError(
                f"bytes of a page of {kind} KV on a GPU",
                value=f"{spec.page_bytes(kind)}, with --page-size {config.page_size}",
                allowed=f"multiples of {ALIGNMENT_BYTES}",
                change="use --page-size 16 or more",
            )


def _look() -> _Sight:
    import torch

    if torch.version.cuda is None:
        return _Sight(
            [],
            f"torch {torch.__version__} is a build for CPUs",
            # Without --force-reinstall pip takes this build for good enough.
            "install one for CUDA: pip install --force-reinstall 'torch>=2.11,<2.14' --index-url "
            "https://download.pytorch.org/whl/cu130",
        )
    if not torch.cuda.is_available():
        return _Sight(
            [],
            "no NVIDIA GPU: torch finds no driver or no device",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, and in a container --gpus all",
        )
    if importlib.util.find_spec("triton") is None:
        return _Sight([], "triton is not installed", "pip install 'cp-shared-kv[gpu]'")
    gpus: list[GPU] = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append(GPU(seen.name, (seen.major, seen.minor), free_bytes, total_bytes))
    return _Sight(gpus)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_look()))
