"""A few bytes of each rank's process to all ranks, over whatever its process group moves."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_bytes(
    content: bytes, process_group: dist.ProcessGroup, device: torch.device
) -> list[bytes]:
    """Every rank's bytes, equally many, by rank. Collective; the host waits for it."""
    where = device if dist.get_backend(process_group) == "nccl" else torch.device("cpu")
    local = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(where)
    parts = [torch.empty_like(local) for _ in range(process_group.size())]
    dist.all_gather(parts, local, group=process_group)
    return [bytes(part.tolist()) for part in parts]
