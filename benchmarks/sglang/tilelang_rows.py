"""`python -m benchmarks.sglang.tilelang_rows`: which rows SGLang's tilelang kernel reads.

Of queries that select fewer rows than it takes, whether a row that nobody selects changes them; and
whether bits change when rows lie elsewhere and the indices say so, as with the tables of scratch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks import Measurement
from benchmarks.record import RESULTS, record

TOKENS, ROWS, HEADS, TOPK = 256, 4096, 128, 2048
LATENT, WIDTH, SCALE = 512, 576, 0.05
RESERVED = 64
"""Rows of the page that padding tokens are written to."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="for a copy of the sources without git")
    options = parser.parse_args()
    path = record(
        "sglang_tilelang_rows", Measurement({}, {}, figures=look()), options.results, options.commit
    )
    print(path.read_text())


def look() -> dict[str, object]:
    """What was found, by what was looked at."""
    random = torch.Generator("cuda").manual_seed(3)
    queries, rows = _normal(random, TOKENS, HEADS, WIDTH), _normal(random, ROWS, 1, WIDTH)
    counts = [token % 97 + 1 for token in range(TOKENS)]
    few = torch.full((TOKENS, TOPK), -1, dtype=torch.int32, device="cuda")
    for token, count in enumerate(counts):
        few[token, :count] = _selection(random, count)
    all_of_them = torch.stack([_selection(random, TOPK) for _ in counts])
    damaged = rows.clone()
    damaged[0] = float("nan")
    moved_to = torch.randperm(ROWS, device="cuda", generator=random)
    moved = torch.empty_like(rows)
    moved[moved_to] = rows

    clean, full = _attend(queries, rows, few), _attend(queries, rows, all_of_them)
    dirty = _attend(queries, damaged, few)
    without_number = dirty.isnan().any(1)
    nobody = torch.full_like(few, -1)
    elsewhere = torch.where(few < 0, few, moved_to[few.clamp(min=0).long()].int())
    return {
        "queries": TOKENS,
        "NaN, of few rows": int(clean.isnan().any(1).sum()),
        "largest difference from fp32, of few rows": _difference(queries, rows, few, counts, clean),
        "NaN, of few rows where row 0 is NaN": int(without_number.sum()),
        "the others equal": bool(torch.equal(dirty[~without_number], clean[~without_number])),
        "2,048 rows: equal where row 0 is NaN": bool(
            torch.equal(_attend(queries, damaged, all_of_them), full)
        ),
        "NaN, of no row": int(_attend(queries, rows, nobody).isnan().any(1).sum()),
        "few rows elsewhere: equal": bool(torch.equal(_attend(queries, moved, elsewhere), clean)),
        "2,048 rows elsewhere: equal": bool(
            torch.equal(_attend(queries, moved, moved_to[all_of_them.long()].int()), full)
        ),
    }


def _normal(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=random).bfloat16()


def _selection(random: torch.Generator, count: int) -> torch.Tensor:
    """Ascending, as SGLang's exact top-k has them, and none of the reserved page."""
    chosen = torch.randperm(ROWS - RESERVED, device="cuda", generator=random)[:count]
    return chosen.sort().values.int() + RESERVED


def _attend(queries: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    from sglang.srt.layers.attention.nsa.tilelang_kernel import (  # pyright: ignore[reportMissingImports]
        tilelang_sparse_fwd,
    )

    kernel: Any = tilelang_sparse_fwd
    return kernel(queries, rows, indices[:, None], SCALE).view(len(queries), -1)


def _difference(
    queries: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    counts: list[int],
    got: torch.Tensor,
) -> float:
    largest = 0.0
    for token, count in enumerate(counts):
        keys = rows[indices[token, :count].long(), 0].float()
        weights = torch.softmax(queries[token].float() @ keys.T * SCALE, -1)
        expected = weights @ keys[:, :LATENT]
        largest = max(largest, float((got[token].view(HEADS, -1).float() - expected).abs().max()))
    return largest


if __name__ == "__main__":
    main()
