"""Which layers of a config run an indexer, by each of the ways that a config may say so."""

from __future__ import annotations

from typing import Any

import pytest

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.model.indexer_sharing import full_indexer_layers


def full_layers(layers: int, **config: Any) -> list[int]:
    every = full_indexer_layers(config, layers, may_share=True)
    assert len(every) == layers
    return [layer for layer, full in enumerate(every) if full]


def test_glm_5_2_runs_21_indexers_in_78_layers() -> None:
    found = full_layers(78, index_topk_freq=4, index_skip_topk_offset=3)
    assert found == [0, 1, 2, *range(6, 78, 4)]
    assert len(found) == 21


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"index_topk_freq": None, "indexer_types": None}, [0, 1, 2, 3, 4, 5, 6]),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 3}, [0, 1, 2, 3, 4, 5, 6]),
        ({"index_topk_freq": 4}, [0, 1, 5]),  # the offset is 2 where none is given
        ({"index_topk_freq": 2}, [0, 1, 3, 5]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [0, 3, 6]),
        ({"index_topk_freq": 100, "index_skip_topk_offset": 5}, [0, 1, 2, 3, 4]),
    ],
)
def test_frequency_and_offset(config: dict[str, Any], expected: list[int]) -> None:
    assert full_layers(7, **config) == expected


def test_a_pattern_overrides_the_frequency_and_a_list_both() -> None:
    frequency = {"index_topk_freq": 2}
    pattern = {**frequency, "index_topk_pattern": "FSSS"}
    assert full_layers(4, **pattern) == [0]
    kinds = ["full", "full", "shared", "full"]
    assert full_layers(4, **pattern, indexer_types=kinds) == [0, 1, 3]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"indexer_types": ["shared", "full", "full"]}, "indexer_types.*first layer"),
        ({"index_topk_pattern": "SFF"}, "index_topk_pattern.*first layer"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "offset.*first layer"),
        ({"indexer_types": ["full", "full"]}, "a list of 3"),
        ({"indexer_types": []}, "a list of 3"),
        ({"indexer_types": "FSS"}, "a list of 3"),
        ({"indexer_types": ["full", ["full"], "full"]}, "a list of 3"),
        ({"indexer_types": ["full", "F", "full"]}, "each full or shared"),
        ({"index_topk_pattern": "FS"}, "3 letters"),
        ({"index_topk_pattern": ""}, "3 letters"),
        ({"index_topk_pattern": "FSC"}, "each F or S"),
        ({"index_topk_pattern": ["F", "S", "S"]}, "3 letters"),
        ({"index_topk_freq": 0}, "index_topk_freq"),
        ({"index_topk_freq": "4"}, "index_topk_freq"),
        ({"index_skip_topk_offset": -1}, "index_skip_topk_offset"),
        ({"index_skip_topk_offset": True}, "index_skip_topk_offset"),
    ],
)
def test_what_does_not_say_it_for_every_layer_is_refused(
    config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        full_layers(3, **config)
    assert "allowed: " in str(refused.value)


def test_an_architecture_without_sharing_refuses_a_shared_layer() -> None:
    config = {"model_type": "deepseek_v32", "index_topk_freq": 4}
    with pytest.raises(ConfigError, match="deepseek_v32"):
        full_indexer_layers(config, 3, may_share=False)
    assert full_indexer_layers(config, 2, may_share=False) == (True, True)
