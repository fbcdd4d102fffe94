"""Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel's module is imported, so the tests import those inside.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
