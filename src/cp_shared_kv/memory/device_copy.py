"""How plans made on the host reach a GPU without the host waiting."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in that device's memory; what is queued on the current stream later sees it."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    # From pageable memory the copy would block. torch keeps pinned memory until it is through.
    return tensor.pin_memory().to(device, non_blocking=True)
