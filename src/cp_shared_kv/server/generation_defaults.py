"""What the checkpoint says about sampling, for requests that do not."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.server.sampling_bounds import out_of_bounds


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling of a request that leaves a field open: OpenAI's defaults unless a checkpoint has
    its own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_directory(cls, directory: Path) -> GenerationDefaults:
        """From `generation_config.json` of a Hugging Face model directory, where there is one.

        `"do_sample": false` makes the default temperature 0, as in transformers. Raises
        `CheckpointError` for a damaged file or a value that no request could have.
        """
        path = directory / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise CheckpointError(
                f"generation_config.json is damaged ({error})",
                value=path,
                change="fetch the file again",
            ) from None
        given = {f.name: config[f.name] for f in fields(cls) if config.get(f.name) is not None}
        for name, value in given.items():
            number = isinstance(value, (int,) if name == "top_k" else (int, float))
            allowed = out_of_bounds(name, value) if number else "a number"
            if allowed is not None:
                raise CheckpointError(
                    f"{name} in generation_config.json is not usable", value=value, allowed=allowed
                )
        if config.get("do_sample") is False:
            given["temperature"] = 0.0
        return cls(**given)
