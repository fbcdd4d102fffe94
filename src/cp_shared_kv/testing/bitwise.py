"""Compares arrays as raw bytes, so that -0.0, NaN payloads and the last bit all count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Array = torch.Tensor | npt.NDArray[np.generic]


@dataclass(frozen=True)
class Difference:
    """The first element, in memory order, whose bytes differ."""

    index: tuple[int, ...]
    left_hex: str
    """Its bytes as a number, most significant digit first."""
    right_hex: str
    count: int
    """How many elements differ in all."""

    def __str__(self) -> str:
        return (
            f"first difference at index {self.index}: {self.left_hex} and {self.right_hex}"
            f" ({self.count} elements differ)"
        )


def first_difference(left: Array, right: Array) -> Difference | None:
    """None when both hold the same bytes; ValueError when dtype or shape already differ."""
    shape, dtype = tuple(left.shape), _dtype_name(left)
    if (shape, dtype) != (tuple(right.shape), _dtype_name(right)):
        raise ValueError(
            f"cannot compare {dtype}{list(shape)} with {_dtype_name(right)}{list(right.shape)}"
        )
    left_bytes, right_bytes = _element_bytes(left), _element_bytes(right)
    differing = np.flatnonzero((left_bytes != right_bytes).any(axis=1))
    if differing.size == 0:
        return None
    first = int(differing[0])
    return Difference(
        index=tuple(int(i) for i in np.unravel_index(first, shape)) if shape else (),
        left_hex=_hex(left_bytes[first]),
        right_hex=_hex(right_bytes[first]),
        count=int(differing.size),
    )


def assert_bitwise_equal(left: Array, right: Array, what: str) -> None:
    """AssertionError that names `what` and the first difference."""
    difference = first_difference(left, right)
    if difference is not None:
        raise AssertionError(f"{what}: {difference}")


def _dtype_name(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")


def _element_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """u8[elements, bytes of one element]."""
    if isinstance(array, torch.Tensor):
        flat = array.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().reshape(-1, flat.element_size())
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).reshape(-1, flat.itemsize)


def _hex(element: npt.NDArray[np.uint8]) -> str:
    return "0x" + element[::-1].tobytes().hex()
