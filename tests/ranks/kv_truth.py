"""The bytes that reads must give, from another source than the pools."""

from __future__ import annotations

import torch
from kv_modes import NUM_LAYERS, POISON, Shape, make_spec

from cp_shared_kv.memory.page_format import PAGE_KINDS, PageKind


class Truth:
    """What every token of the logical pool should hold, kept apart from all that is tested.

    Narrow rows are any bits whatever. Wide ones are what the format makes of random values; that
    these are the right bytes is for the formats' own tests to say.
    """

    def __init__(self, shape: Shape, cp_size: int) -> None:
        self.shape = shape
        self.spec = make_spec(shape)
        locs = (cp_size * shape.physical_pages + 1) * shape.page_size
        self.rows: dict[tuple[PageKind, int], torch.Tensor] = {
            (kind, layer): torch.full(
                (locs, self.spec.format(kind).row_bytes), POISON, dtype=torch.uint8
            )
            for kind in PAGE_KINDS
            for layer in self.spec.layers(kind)
        }

    def compute(self, seed: int, layer: int, locs: torch.Tensor) -> dict[PageKind, torch.Tensor]:
        """New values for the batch's tokens, the same on every rank."""
        generator = torch.Generator().manual_seed(seed * NUM_LAYERS + layer)
        latent_width, rope_width, index_width = self.shape.widths
        widths: dict[PageKind, int] = {"latent": latent_width + rope_width, "index": index_width}
        computed: dict[PageKind, torch.Tensor] = {}
        for kind, width in widths.items():
            if (kind, layer) not in self.rows:
                continue
            if self.shape.formats is None:
                size = (len(locs), 4 * width)
                new = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
                computed[kind], self.rows[kind, layer][locs] = new.view(torch.float32), new
            else:
                exponents = torch.randint(-30, 30, (len(locs), 1), generator=generator)
                values = torch.randn(len(locs), width, generator=generator) * 2.0**exponents
                computed[kind] = values
                self.rows[kind, layer][locs] = self.encode(kind, values)
        return computed

    def encode(self, kind: PageKind, values: torch.Tensor) -> torch.Tensor:
        if kind == "index":
            return self.spec.index.encode(values)
        width = self.shape.widths[0]
        return self.spec.latent.encode(values[:, :width], values[:, width:])

    def decode(self, kind: PageKind, rows: torch.Tensor) -> torch.Tensor:
        if kind == "index":
            return self.spec.index.decode(rows, torch.float32)
        return torch.cat(self.spec.latent.decode(rows, torch.float32), dim=1)
