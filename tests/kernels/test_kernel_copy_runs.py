"""Ranges of one buffer arrive in another, at their places and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cp_shared_kv.transfer.strided_copy import copy_runs as copy_on_cpu

BYTES = 1 << 18


@pytest.mark.parametrize("seed", range(3))
def test_every_range_arrives_and_nothing_else(device: torch.device, seed: int) -> None:
    from cp_shared_kv.kernels.copy_runs import copy_runs

    random = np.random.default_rng(seed)
    # One range longer than a block of the kernel, one of the least length, and some between.
    lengths = np.array([40_000, 16, 8192, 8208, *random.integers(1, 500, 9) * 16])
    gaps = random.integers(0, 60, len(lengths)) * 16
    targets = np.cumsum(lengths + gaps) - lengths
    sources = random.integers(0, (BYTES - lengths) // 16 + 1) * 16
    order = random.permutation(len(lengths))
    runs = np.stack((sources[order], targets[order], lengths[order]))

    held = torch.from_numpy(random.integers(0, 256, BYTES, dtype=np.uint8))
    expected = np.full(BYTES, 0xA5, np.uint8)
    copy_on_cpu(held.numpy(), expected, *runs)

    source = held.to(device)
    target = torch.full((BYTES,), 0xA5, dtype=torch.uint8, device=device)
    runs[1] += target.data_ptr() - source.data_ptr()
    copy_runs(source, torch.from_numpy(runs // 8).to(device), int(lengths.max()) // 8)
    assert np.array_equal(target.cpu().numpy(), expected)


def test_no_ranges_copy_nothing(device: torch.device) -> None:
    from cp_shared_kv.kernels.copy_runs import copy_runs

    source = torch.zeros(64, dtype=torch.uint8, device=device)
    copy_runs(source, torch.empty((3, 0), dtype=torch.int64, device=device), 0)
