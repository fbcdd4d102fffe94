"""How fast a GPU does each part of a prefill: what the cost model divides by."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.planner.gpus import Gpu

# The parts of the peaks that kernels reach, from H200's: 0.8 and 0.9 of 1.979 PF fp8, 0.55 of
# 0.989 PF bf16, 4.0 of 4.8 TB/s, and 75.5 MB of peer pages in 0.232 ms of 450 GB/s. Assumed, the
# last one measured in a sketch; a results file replaces what it has.
_LINEAR_OF_FP8, _INDEX_OF_FP8, _MLA_OF_BF16 = 0.8 / 1.979, 0.9 / 1.979, 0.55 / 0.989
_OF_HBM, _OF_LINK = 4.0 / 4.8, 75.5e6 / 0.232e-3 / 450e9

_PULL = re.compile(r"(.+): (pull|push)")


@dataclass(frozen=True, slots=True)
class Rates:
    """Work a second of one GPU, as reached and not as advertised. `network` is one rank's NIC."""

    linear_flops: float
    index_flops: float
    mla_flops: float
    hbm_bytes: float
    link_bytes: float
    network_bytes: float = 40e9
    source: str = "assumed parts of the GPU's peaks, not measured"

    @classmethod
    def of_gpu(cls, gpu: Gpu) -> Rates:
        """What kernels are assumed to reach on it."""
        return cls(
            linear_flops=gpu.fp8_flops * _LINEAR_OF_FP8,
            index_flops=gpu.fp8_flops * _INDEX_OF_FP8,
            mla_flops=gpu.bf16_flops * _MLA_OF_BF16,
            hbm_bytes=gpu.hbm_bytes_per_second * _OF_HBM,
            link_bytes=gpu.link_bytes_per_second * _OF_LINK,
        )

    def with_results(self, path: Path) -> Rates:
        """With what a results file of `python -m benchmarks.gpu` has measured.

        From gpu_full_prefix: the links, by the fastest whole-prefix read of the longest prefix. A
        file {"rates": {...}} sets any of the rates by name. ConfigError for any other file.
        """
        content = _read(path)
        given = content.get("rates")
        if isinstance(given, dict):
            return replace(self, **_checked(given, path), source=f"{path.name}, the rest assumed")
        if content.get("benchmark") == "gpu_full_prefix":
            link = _link_bytes(content, path)
            return replace(
                self, link_bytes=link, source=f"links measured in {path.name}, the rest assumed"
            )
        raise ConfigError(
            "--gpu-results has no rates",
            value=path,
            allowed='a record of gpu_full_prefix, or {"rates": {...}} with any of '
            + ", ".join(_NAMES),
        )

    def as_plain(self) -> dict[str, Any]:
        """All rates and where they come from, for reports."""
        return asdict(self)


_NAMES = ("linear_flops", "index_flops", "mla_flops", "hbm_bytes", "link_bytes", "network_bytes")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("--gpu-results cannot be read", value=f"{path} ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError("--gpu-results is not a JSON object", value=path)
    return content


def _checked(given: Mapping[str, Any], path: Path) -> dict[str, float]:
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in _NAMES or not number or not value > 0:
            raise ConfigError(
                f"--gpu-results {path}: rates.{name}",
                value=value,
                allowed=f"numbers above 0, named {', '.join(_NAMES)}",
            )
    return {name: float(value) for name, value in given.items()}


def _link_bytes(content: Mapping[str, Any], path: Path) -> float:
    """Bytes a second out of a peer, from a record's samples and the bytes that they moved."""
    try:
        moved: dict[str, int] = content["config"]["remote_bytes"]
        most = max(moved.values())
        found = [
            moved[match[1]] / statistics.median(samples)
            for name, samples in content["samples_seconds"].items()
            if (match := _PULL.fullmatch(name)) and moved.get(match[1]) == most
        ]
        return max(found)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ConfigError(
            "--gpu-results is no complete record of gpu_full_prefix", value=f"{path} ({error!r})"
        ) from error
