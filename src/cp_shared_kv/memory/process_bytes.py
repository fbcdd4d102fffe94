"""A few bytes of each rank's process to all ranks, over whatever its process group moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from cp_shared_kv.errors import StartupError


def all_gather_bytes(
    content: bytes, process_group: dist.ProcessGroup, device: torch.device
) -> list[bytes]:
    """Every rank's bytes, equally many, by rank. Collective; the host waits for it."""
    where = device if dist.get_backend(process_group) == "nccl" else torch.device("cpu")
    local = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(where)
    parts = [torch.empty_like(local) for _ in range(process_group.size())]
    dist.all_gather(parts, local, group=process_group)
    return [bytes(part.tolist()) for part in parts]


def raise_if_any_failed(
    failure: Exception | None, failed_by_rank: Sequence[bool], what: str
) -> None:
    """On every rank, once all know of each: its own reason, or which others could not do it."""
    if failure is not None:
        raise failure
    failed = [rank for rank, has_failed in enumerate(failed_by_rank) if has_failed]
    if failed:
        raise StartupError(f"another rank could not {what}", value=f"ranks {failed}")
