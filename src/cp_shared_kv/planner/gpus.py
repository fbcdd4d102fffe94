"""GPUs that plans are made for: memory, links and peak rates, from their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from cp_shared_kv.errors import ConfigError

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. Rates are dense peaks; `link` is NVLink in one direction.

    `memory_bytes` is what the driver shows, which is less than the number in the name.
    """

    name: str
    memory_bytes: int
    bf16_flops: float
    fp8_flops: float
    hbm_bytes_per_second: float
    link_bytes_per_second: float


# Memory as nvidia-smi reports it; rates from NVIDIA's data sheets, half of what they give "with
# sparsity"; H20 from those of its resellers.
_GPUS = (
    Gpu("h20", 97_871 * MIB, 148e12, 296e12, 4.0e12, 450e9),
    Gpu("h20-3e", 143_771 * MIB, 148e12, 296e12, 4.8e12, 450e9),
    Gpu("h100", 81_559 * MIB, 989e12, 1979e12, 3.35e12, 450e9),
    Gpu("h200", 143_771 * MIB, 989e12, 1979e12, 4.8e12, 450e9),
    Gpu("h800", 81_559 * MIB, 989e12, 1979e12, 3.35e12, 200e9),
    Gpu("b200", 183_359 * MIB, 2250e12, 4500e12, 8.0e12, 900e9),
)
GPUS = {gpu.name: gpu for gpu in _GPUS}


def gpu_named(name: str) -> Gpu:
    """The GPU of that name, in upper or lower case. ConfigError for one that is not listed."""
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError(
            "--gpu is not in the planner's list",
            value=name,
            allowed=", ".join(GPUS),
            change="give --gpu-memory-gib for any other",
        )
    return found
