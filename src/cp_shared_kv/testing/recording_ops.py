"""The reference ops, keeping what was selected and by how much."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional

from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.ops.interface import AttentionOps
from cp_shared_kv.model.ops.reference import REFERENCE_OPS, select_topk


class RecordedSelections:
    """Give `ops` to a Transformer; `take` what each of its forwards selected."""

    def __init__(self) -> None:
        self.ops: AttentionOps = dataclasses.replace(REFERENCE_OPS, select_topk=self._select)
        self._selected: list[torch.Tensor] = []
        self._margins: list[torch.Tensor] = []

    def take(self, config: ModelConfig, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last forward, of so many rows: positions i64[layers, rows, index_topk], margins
        fp32[layers, rows] between the last selected score and the first left out. The layers are
        those with an indexer."""
        layers, k = len(config.index_layers), config.index_topk
        selected = torch.cat(self._selected) if rows else torch.empty(0, k, dtype=torch.int64)
        margins = torch.cat(self._margins) if rows else torch.empty(0)
        self._selected.clear()
        self._margins.clear()
        return selected.view(layers, rows, k), margins.view(layers, rows)

    def _select(self, scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
        chosen = select_topk(scores, visible, k)
        self._selected.append(functional.pad(chosen, (0, k - chosen.shape[1]), value=-1))
        hidden = torch.arange(scores.shape[1]) >= visible.unsqueeze(1)
        margins = torch.full((len(scores),), float("inf"))
        if scores.shape[1] > k:
            best = scores.masked_fill(hidden, float("-inf")).sort(dim=1, descending=True).values
            margins = torch.where(visible > k, best[:, k - 1] - best[:, k], margins)
        self._margins.append(margins)
        return chosen
