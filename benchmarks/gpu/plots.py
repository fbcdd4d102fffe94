"""Draws docs/gpu/*.svg from the newest results: `python -m benchmarks.gpu.plots`.

Needs the extra `plots`; no GPU. The floor is drawn in each: the same bytes by a plain copy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import RESULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWINGS = Path(__file__).parents[2] / "docs/gpu"
NAMES = {"bf16": "bf16, 1152 B a row", "fp8_ds_mla": "fp8_ds_mla, 656 B a row"}
WAYS = {
    "push": ("#0b6e4f", "o"),
    "pull": ("#2274a5", "s"),
    "pack and all-gather": ("#f1a208", "^"),
    "zero fill, copy, all-reduce, planned": ("#a44a3f", "v"),
    "zero fill, masked copy, all-reduce": ("#6b2d5c", "x"),
}
FLOOR = "peer copy"


def newest(name: str) -> dict[str, Any]:
    """The last recorded run of that benchmark."""
    return json.loads(max(RESULTS.glob(f"{name}-*.json")).read_text())


def by_tokens(run: dict[str, Any], latent_name: str, what: str) -> dict[int, float]:
    """Prefix tokens -> median seconds."""
    found: dict[int, float] = {}
    for sample, summary in run["summary_seconds"].items():
        case, _, way = sample.partition(": ")
        name, _, tokens = case.partition(", ")
        if name == latent_name and way == what:
            found[int(tokens.removesuffix(" K")) << 10] = summary["median"]
    return found


def draw_full_prefix() -> None:
    """Each way's speed as a part of the floor's, over the length of the prefix."""
    from matplotlib import pyplot

    run = newest("gpu_full_prefix")
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, (name, title) in zip(axes, NAMES.items(), strict=True):
        floor = by_tokens(run, name, FLOOR)
        axis.axhline(1.0, color="black", linewidth=1, label="floor: peer copy of the remote bytes")
        for way, (color, marker) in WAYS.items():
            seconds = by_tokens(run, name, way)
            ratios = [floor[tokens] / seconds[tokens] for tokens in seconds]
            axis.plot(list(seconds), ratios, marker=marker, color=color, label=way)
        _over_tokens(axis, list(floor), title)
    axes[0].set_ylabel("speed, peer copy = 1")
    axes[0].set_ylim(0, 1.15)
    _save(figure, axes[0], "full-prefix")


def draw_selected_rows() -> None:
    """Microseconds of selected rows and of the whole prefix, with the floor of each."""
    from matplotlib import pyplot

    run = newest("gpu_selected_rows")
    floors = newest("gpu_floors")
    bytes_a_second = (
        floors["config"]["bytes"]
        / floors["summary_seconds"]["peer copy, both directions"]["median"]
    )
    cases = [(name, how) for name in NAMES for how in ("uniform", "clustered")]
    figure, axis = pyplot.subplots(figsize=(9, 4))
    bars = ("whole prefix, pull", "whole prefix, push", "selected rows")
    for number, (name, how) in enumerate(cases):
        case = f"{name}, 1024 K, {how}"
        for place, (bar, color) in enumerate(
            zip(bars, ("#2274a5", "#0b6e4f", "#f1a208"), strict=True)
        ):
            seconds = run["summary_seconds"][f"{case}: {bar}"]["median"]
            label = bar if number == 0 else None
            axis.bar(number + 0.25 * (place - 1), seconds * 1e6, 0.23, color=color, label=label)
        remote = max(max(rank["remote_bytes"]) for rank in run["config"]["counted"][case])
        axis.hlines(
            remote / bytes_a_second * 1e6,
            number + 0.13,
            number + 0.37,
            color="black",
            label="floor: remote bytes of the selected rows at the speed of a peer copy"
            if number == 0
            else None,
        )
    axis.set_yscale("log")
    axis.set_ylabel("microseconds, prefix of 1 M tokens")
    axis.set_xticks(range(len(cases)), [f"{name}\n{how}" for name, how in cases])
    _save(figure, axis, "selected-rows")


def draw_time_to_first_token() -> None:
    """Each way's time over the length of the prefix, replicated = 1."""
    from matplotlib import pyplot

    found = newest("gpu_time_to_first_token")["summary_seconds"]
    ways = {"auto": ("#0b6e4f", "o"), "collective": ("#f1a208", "^")}
    # Until auto took selected rows, it was called by what it chose from.
    named = {"auto": "auto" if any(case.endswith(": auto") for case in found) else "pull or push"}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, new in zip(axes, (4096, 512), strict=True):
        axis.axhline(1.0, color="black", linewidth=1, label="every page on every rank")
        axis.axhline(1.03, color="black", linewidth=1, linestyle=":", label="goal: 1.03")
        for name, line in (("bf16", "-"), ("fp8_e4m3", "--")):
            lengths = [
                count for count in (8, 32, 128, 512) if f"{name}, {count} K + {new}: push" in found
            ]
            for way, (color, marker) in ways.items():
                ratios = []
                for count in lengths:
                    case = f"{name}, {count} K + {new}"
                    base = found[f"{case}: replicated"]["median"]
                    ratios.append(found[f"{case}: {named.get(way, way)}"]["median"] / base)
                tokens = [count << 10 for count in lengths]
                axis.plot(
                    tokens,
                    ratios,
                    line,
                    color=color,
                    marker=marker,
                    label=f"{named.get(way, way)}, {name}",
                )
        _over_tokens(axis, [1 << 13, 1 << 15, 1 << 17, 1 << 19], f"{new} new tokens")
    axes[0].set_ylabel("time to first token, replicated = 1")
    axes[0].set_yscale("log")
    axes[0].set_yticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"], minor=False)
    axes[0].minorticks_off()
    _save(figure, axes[0], "time-to-first-token")


def draw_kernels() -> None:
    """Our kernels' speed as a part of DeepGEMM's and FlashMLA's."""
    from matplotlib import pyplot

    scores = newest("gpu_index_scores")["summary_seconds"]
    attention = newest("gpu_attention")["summary_seconds"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis in axes:
        axis.axhline(1.0, color="black", linewidth=1, label="DeepGEMM, FlashMLA")
        axis.axhline(0.5, color="black", linewidth=1, linestyle=":", label="goal: 0.5")
    _ratios(
        axes[0], scores, "queries", "DeepGEMM", {"e4m3": "Triton, e4m3", "bf16": "Triton, bf16"}
    )
    axes[0].set_title("index scores, DeepGEMM = 1")
    for form in ("fp8", "bf16"):
        _ratios(axes[1], attention, "tokens", f"{form}, FlashMLA", {form: f"{form}, Triton"})
    axes[1].set_title("attention to 2048 rows a token, FlashMLA = 1")
    axes[0].set_ylabel("speed of our kernel")
    axes[0].set_yscale("log", base=2)
    axes[0].set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
    _save(figure, axes[0], "kernels")


def _ratios(axis: Axes, found: dict[str, Any], of: str, peer: str, ways: dict[str, str]) -> None:
    """One line for each way and number of keys or rows, over the queries or tokens of a call."""
    for name, way in ways.items():
        for kilo, line in ((128, "-"), (1024, "--")):
            counts = sorted(
                int(case.split()[0]) for case in found if case.endswith(f" {of}, {kilo} K: {way}")
            )
            ratios = [
                found[f"{count} {of}, {kilo} K: {peer}"]["median"]
                / found[f"{count} {of}, {kilo} K: {way}"]["median"]
                for count in counts
            ]
            color = {"e4m3": "#0b6e4f", "fp8": "#0b6e4f", "bf16": "#2274a5"}[name]
            label = f"{'fp8' if name == 'e4m3' else name}, {'1 M' if kilo == 1024 else '128 K'}"
            axis.plot(counts, ratios, line, color=color, marker="o", label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks([64, 256, 1024, 4096], ["64", "256", "1024", "4096"])
    axis.set_xlabel(f"{of} in a call")
    axis.grid(alpha=0.3)


def _over_tokens(axis: Axes, tokens: list[int], title: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [f"{count >> 10} K" for count in tokens])
    axis.set_xlabel("prefix tokens")
    axis.set_title(title)
    axis.grid(alpha=0.3)


def _save(figure: Any, legend_of: Axes, name: str) -> None:
    handles, labels = legend_of.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.set_layout_engine("constrained")
    DRAWINGS.mkdir(parents=True, exist_ok=True)
    figure.savefig(DRAWINGS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    from matplotlib import rcParams

    rcParams["svg.hashsalt"] = "docs/gpu"  # the same drawing gives the same file
    draw_full_prefix()
    draw_selected_rows()
    draw_time_to_first_token()
    draw_kernels()
