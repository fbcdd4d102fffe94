"""What has gone over a GPU's NVLinks so far, by the counters of the links, which are only read."""

from __future__ import annotations

import re
import subprocess

_SECONDS = 20
_GPU = re.compile(r"^GPU (\d+):", re.MULTILINE)
_DATA = re.compile(r"Data (Tx|Rx): (\d+) KiB")


def nvlink_kib() -> dict[int, dict[str, int]] | str:
    """KiB by GPU, sent ("Tx") and received ("Rx") over all its links; or why they are not known."""
    command = ["nvidia-smi", "nvlink", "--getthroughput", "d"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    counted = counters(done.stdout)
    if done.returncode or not counted:
        return f"{' '.join(command)}: {(done.stdout + done.stderr).strip()[:300] or 'no output'}"
    return counted


def counters(printed: str) -> dict[int, dict[str, int]]:
    """The sums in what nvidia-smi prints; without GPUs whose links have no counters."""
    parts = _GPU.split(printed)[1:]
    found: dict[int, dict[str, int]] = {}
    for index, links in zip(parts[::2], parts[1::2], strict=True):
        moved = _DATA.findall(links)
        if moved:
            found[int(index)] = {
                way: sum(int(kib) for this, kib in moved if this == way) for way in ("Tx", "Rx")
            }
    return found


def between(
    before: dict[int, dict[str, int]] | str, after: dict[int, dict[str, int]] | str
) -> dict[str, object] | str:
    """Bytes by GPU meanwhile, and the busiest GPU over the mean; or why they are unknown."""
    if isinstance(before, str) or isinstance(after, str):
        return before if isinstance(before, str) else str(after)
    moved: dict[str, object] = {}
    for way, name in (("Tx", "sent_bytes"), ("Rx", "received_bytes")):
        by_gpu = [(after[gpu][way] - before[gpu][way]) << 10 for gpu in sorted(before)]
        moved[name] = by_gpu
        mean = sum(by_gpu) / len(by_gpu)
        moved[f"busiest_over_mean_{name}"] = round(max(by_gpu) / mean, 4) if mean else None
    return moved
