"""Draws docs/soak.svg from the newest result of the benchmark `soak`. Needs matplotlib."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Memory of each process above, tokens of the pool below, over the minutes of the run."""
    result = json.loads(max((ROOT / "benchmarks/results").glob("soak-*.json")).read_text())
    soak = result["config"]["soak"]
    mpl.rcParams["svg.hashsalt"] = "soak"  # the same picture from the same figures
    figure, (memory, pages) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    for name, values in soak["resident_mib"].items():
        memory.plot(soak["minutes"], values, label=name)
    memory.set_ylabel("private memory, MiB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize="small", ncols=3, loc="lower right")
    counts = ", ".join(
        f"{count} {what.replace('_', ' ')}" for what, count in soak["requests"].items()
    )
    memory.set_title(f"{result['config']['clients']} clients, {counts}", fontsize="medium")
    used, kept = soak["used_tokens"], soak["evictable_tokens"]
    pages.stackplot(soak["minutes"], used, kept, labels=["used", "cached"], alpha=0.6)
    pages.set_ylabel("logical tokens")
    pages.set_xlabel("minutes")
    pages.legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(ROOT / "docs/soak.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
