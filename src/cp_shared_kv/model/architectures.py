"""What the supported model types differ in beside their sizes, and what they all have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.model.json_fields import refuse

RopeStyle = Literal["interleaved", "half-split"]

# A checkpoint may leave these out; any other value is another model than the one written here.
_FIXED: dict[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Architecture:
    """One model type. `rms_norm_eps` holds where config.json has none."""

    index_rope_style: RopeStyle
    rms_norm_eps: float
    shares_selections: bool
    """May a layer be without an indexer and attend to what an earlier layer selected?"""


_ARCHITECTURES = {
    "deepseek_v32": Architecture("half-split", 1e-6, shares_selections=False),
    "glm_moe_dsa": Architecture("interleaved", 1e-5, shares_selections=True),
}


def architecture(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """The model type of a parsed config.json and what goes with it.

    Raises ConfigError for another model type, and for a setting that no supported model has.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ConfigError(
            "config.json: model_type is not supported",
            value=repr(name),
            allowed=", ".join(_ARCHITECTURES),
            change="serve a DeepSeek-V3.2 or GLM-5 checkpoint",
        )
    found = _ARCHITECTURES[name]
    interleaved = found.index_rope_style == "interleaved"
    for field, only in {**_FIXED, "indexer_rope_interleave": interleaved}.items():
        if (value := config.get(field, only)) is not None and value != only:
            raise refuse(field, value, repr(only))
    return name, found
