"""Named tensors out of a directory of safetensors files, each checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.model.fp8_weights import SCALE_SUFFIX, dequantised, scale_shape
from cp_shared_kv.model.regular_file import check_regular_file

_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")
_FP8 = "F8_E4M3"


class Checkpoint:
    """The tensors of a model directory: one file, or shards listed by an index.

    Opening it reads the headers only. Raises CheckpointError on a file that is missing,
    truncated or not safetensors, and on an index that does not agree with its shards.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        listed = self._listed_files()
        for file in sorted(set(listed.values())) if listed else self._single_file():
            handle = _open(directory / file)
            self._handles[file] = handle
            self._file_of.update(dict.fromkeys(handle.keys(), file))
        for name, file in listed.items():
            if name not in self._file_of or self._file_of[name] != file:
                raise CheckpointError(
                    f"tensor {name} is not in the file that {_INDEX} names", value=directory / file
                )

    @property
    def names(self) -> frozenset[str]:
        """Every tensor of the directory."""
        return frozenset(self._file_of)

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, block_fp8: bool) -> frozenset[str]:
        """Raise CheckpointError unless every named tensor is there, in that shape, of a known type.

        With `block_fp8` a matrix may be e4m3 if its scales are there too. Returns the names that
        `shapes` accounts for, such scales included.
        """
        self._require(shapes)
        scales: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            allowed = (*_DTYPES, _FP8) if block_fp8 and len(shape) == 2 else _DTYPES
            if self._check_one(name, shape, allowed) == _FP8:
                scales[name + SCALE_SUFFIX] = scale_shape(shape)
        self._require(scales)
        for name, shape in scales.items():
            self._check_one(name, shape, ("F32",))
        return frozenset(shapes) | frozenset(scales)

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """One tensor checked before, in the given dtype, in memory of its own; fp8 times scales."""
        stored = self._handles[self._file_of[name]].get_tensor(name)
        if stored.dtype == torch.float8_e4m3fn:
            scale = self.tensor(name + SCALE_SUFFIX, torch.float32, device)
            return dequantised(stored.to(device), scale, dtype)
        return stored.to(device=device, dtype=dtype, copy=True)

    def _require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        missing = [name for name in shapes if name not in self._file_of]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} tensor(s), the first {missing[0]}",
                value=f"{self.directory} ({', '.join(sorted(self._handles))})",
                allowed=f"{missing[0]} of shape {list(shapes[missing[0]])}",
                change="give a complete checkpoint, or the config.json that belongs to it",
            )

    def _check_one(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
        """Check a tensor that is there; returns its dtype as safetensors writes it."""
        path = self.directory / self._file_of[name]
        part = self._handles[self._file_of[name]].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise CheckpointError(
                f"tensor {name} in {path} has shape",
                value=list(part.get_shape()),
                allowed=f"{list(shape)}, by the directory's config.json",
            )
        if (dtype := part.get_dtype()) not in dtypes:
            raise CheckpointError(
                f"tensor {name} in {path} has dtype", value=dtype, allowed=", ".join(dtypes)
            )
        return dtype

    def _single_file(self) -> list[str]:
        if not (self.directory / "model.safetensors").is_file():
            raise CheckpointError(
                "no model weights in the directory",
                value=self.directory,
                allowed=f"model.safetensors, or {_INDEX} with its shards",
            )
        return ["model.safetensors"]

    def _listed_files(self) -> dict[str, str]:
        path = self.directory / _INDEX
        if not path.exists():
            return {}
        check_regular_file(path)
        try:
            listed: Any = json.loads(path.read_bytes())["weight_map"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise CheckpointError("cannot read the weight_map of", value=path) from error
        if not isinstance(listed, dict):
            raise CheckpointError("the weight_map is not an object", value=path)
        for name, file in listed.items():
            # A name with a folder in it could lead out of the model directory.
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(
                    f"{path} places {name} in", value=repr(file), allowed="a file of its own folder"
                )
        return listed


def _open(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError("no such weights file", value=path)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            "not a complete safetensors file",
            value=f"{path} of {path.stat().st_size} bytes ({_damage(path, error)})",
            change="copy the file again",
        ) from error


def _damage(path: Path, error: Exception) -> str:
    """Name the first tensor that the file is too short for, where its header can be read."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > path.stat().st_size:
            return str(error)
        try:
            header: Any = json.loads(file.read(header_bytes))
            ends = {
                name: 8 + header_bytes + int(entry["data_offsets"][1])
                for name, entry in header.items()
                if name != "__metadata__"
            }
        # None of them says more than the error does. OverflowError: an end of Infinity.
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError, OverflowError):
            return str(error)
    cut = [(end, name) for name, end in ends.items() if end > path.stat().st_size]
    if not cut:
        return str(error)
    end, name = min(cut)
    return f"tensor {name} should end at byte {end}; the whole file has {max(cut)[0]}"
