"""The API key out of the environment: on a command line every user of the machine could read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.config_values import API_KEY_VARIABLE


def with_api_key(config: EngineConfig, environment: Mapping[str, str]) -> EngineConfig:
    """The config with the key of $CPKV_API_KEY where --api-key gives none.

    A variable that is set and empty is refused (ConfigError): it was meant to be a key.
    """
    if config.api_key is not None or API_KEY_VARIABLE not in environment:
        return config
    return replace(config, api_key=environment[API_KEY_VARIABLE])
