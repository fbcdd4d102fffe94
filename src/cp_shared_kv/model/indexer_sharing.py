"""Which layers run an indexer, and which attend to what an earlier layer has selected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cp_shared_kv.model.json_fields import integer, refuse

_KINDS = ("full", "shared")
_LETTERS = ("F", "S")


def full_indexer_layers(
    config: Mapping[str, Any], layers: int, *, may_share: bool
) -> tuple[bool, ...]:
    """Per layer: True where it runs its own indexer, False where it shares the last selection.

    The list `indexer_types` has the first word, then the string `index_topk_pattern`, then
    `index_topk_freq` with `index_skip_topk_offset` (the order of transformers): layer i is full
    where max(i - offset + 1, 0) is a multiple of freq (IndexShare, arXiv 2603.12201).

    Raises ConfigError for settings that do not say it for every layer, for a first layer that is
    not full, and for a shared layer where the architecture has none.
    """
    field, full = _declared(config, layers)
    if not full[0]:
        raise refuse(field, config.get(field), "a first layer that is full: none is before it")
    if not may_share and not all(full):
        allowed = f"full layers only: {config.get('model_type')} has no shared ones"
        raise refuse(field, config.get(field), allowed)
    return full


def _declared(config: Mapping[str, Any], layers: int) -> tuple[str, tuple[bool, ...]]:
    """The field that says it, and what it says."""
    types, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if types is not None:
        whole = isinstance(types, list) and len(types) == layers
        if not whole or any(kind not in _KINDS for kind in types):
            raise refuse("indexer_types", types, f"a list of {layers}, each full or shared")
        return "indexer_types", tuple(kind == "full" for kind in types)
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - set(_LETTERS):
            raise refuse("index_topk_pattern", pattern, f"{layers} letters, each F or S")
        return "index_topk_pattern", tuple(letter == "F" for letter in pattern)
    freq = integer(config, "index_topk_freq", 1)
    offset = integer(config, "index_skip_topk_offset", 2, least=0)
    every = tuple(max(layer - offset + 1, 0) % freq == 0 for layer in range(layers))
    return "index_topk_freq" if every[0] else "index_skip_topk_offset", every
