"""Pictures of a sweep, as SVG. Needs the extra `plots`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cp_shared_kv.errors import CpkvError
from cp_shared_kv.planner.report import Row, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (7.4, 3.8)
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#e0a030", "#555555")


def check_plots_place(directory: Path) -> None:
    """Raise what `draw_plots` would, before there is anything to draw."""
    if find_spec("matplotlib") is None:
        raise CpkvError(
            "--plots needs matplotlib, which is not installed",
            change="pip install 'cp-shared-kv[plots]'",
        )
    with writing("--plots", directory):
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()


def draw_plots(rows: Sequence[Row], directory: Path, title: str) -> list[Path]:
    """Draw what the cases have; returns the files.

    CpkvError when matplotlib is not installed or the directory cannot be written.
    """
    check_plots_place(directory)
    import matplotlib

    # The same results give the same file.
    style: dict[Any, Any] = {
        "svg.hashsalt": "cpkv",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with writing("--plots", directory), matplotlib.rc_context(style):
        return list(_draw_all(rows, directory, title))


def _draw_all(rows: Sequence[Row], directory: Path, title: str) -> Iterator[Path]:
    pictures: dict[str, Callable[[Axes, Sequence[Row]], None]] = {
        "hit-rate": _hit_rate,
        "first-token": _first_token,
        "owner-balance": _owner_balance,
    }
    if any(row["descriptors"] for row in rows):
        pictures["descriptors"] = _descriptors
    for name, draw in pictures.items():
        path = directory / f"{name}.svg"
        _draw(path, rows, title, draw)
        yield path


def _draw(
    path: Path, rows: Sequence[Row], title: str, draw: Callable[[Axes, Sequence[Row]], None]
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes: Axes = figure.subplots()
    draw(axes, rows)
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(visible=True, axis="y", alpha=0.3)
    # Beside the lines, which may run anywhere.
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(path, metadata={"Date": None})


def _hit_rate(axes: Axes, rows: Sequence[Row]) -> None:
    for colour, (users, found) in _by_users(rows):
        values = [100 * row["hit_rate"] for row in found]
        axes.plot(_places(found), values, "o-", color=colour, label=_label(users))
    axes.set_ylabel("prompt tokens found in the cache, %")
    axes.set_ylim(0, 100)
    _multiplier_axis(axes, rows)


def _first_token(axes: Axes, rows: Sequence[Row]) -> None:
    for colour, (users, found) in _by_users(rows):
        for quantile, style in (("p50", "o-"), ("p99", "o:")):
            values = [_quantile(row, "first_token_seconds", quantile) for row in found]
            label = f"{_label(users)}, {quantile}"
            axes.plot(_places(found), values, style, color=colour, label=label)
    _log_axis(axes)
    axes.set_ylabel("time to first token, s")
    _multiplier_axis(axes, rows)


def _owner_balance(axes: Axes, rows: Sequence[Row]) -> None:
    for colour, (users, found) in _by_users(rows):
        for quantile, style in (("p50", "o-"), ("p99", "o:")):
            values = [_quantile(row, "busiest_owner_over_ideal", quantile) for row in found]
            label = f"{_label(users)}, {quantile}"
            axes.plot(_places(found), values, style, color=colour, label=label)
    axes.axhline(1.01, color="#999999", linewidth=0.8, label="goal at p50: 1.01")
    axes.axhline(1.03, color="#999999", linewidth=0.8, linestyle=":", label="goal at p99: 1.03")
    axes.set_ylabel("busiest owner's pages over an even share")
    _multiplier_axis(axes, rows)


def _descriptors(axes: Axes, rows: Sequence[Row]) -> None:
    for colour, (users, found) in _by_users(rows):
        counted = [row for row in found if row["descriptors"]]
        for way, style in (("plain", "o:"), ("striped", "o-")):
            values = [
                row["descriptors"][f"{way}_total"] / row["descriptors"]["transfers"]
                for row in counted
            ]
            label = f"{_label(users)}, {way}"
            axes.plot(_places(counted), values, style, color=colour, label=label)
    _log_axis(axes)
    axes.set_ylabel("descriptors a transfer, layer and kind")
    _multiplier_axis(axes, rows)


def _quantile(row: Row, name: str, quantile: str) -> float:
    """NaN, which leaves a gap, where every request was refused."""
    return math.nan if row[name] is None else row[name][quantile]


def _by_users(rows: Sequence[Row]) -> Iterator[tuple[str, tuple[int | None, list[Row]]]]:
    groups: dict[int | None, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["users"], []).append(row)
    for number, (users, found) in enumerate(groups.items()):
        found.sort(key=lambda row: row["multiplier"])
        yield _COLOURS[number % len(_COLOURS)], (users, found)


def _places(rows: Sequence[Row]) -> list[int]:
    return [row["multiplier"] for row in rows]


def _label(users: int | None) -> str:
    return "recorded times" if users is None else f"{users} users"


def _log_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")


def _multiplier_axis(axes: Axes, rows: Sequence[Row]) -> None:
    ticks = sorted({row["multiplier"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick} x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("pool, in ranks' worth of tokens")
