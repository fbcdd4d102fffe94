"""The door of the layer: settings and ids are checked here, so that the arithmetic need not be.

Host memory (NumPy arrays, CPU tensors) is read and refused when wrong. Accelerator memory is
never read: a check there would make the host wait for the device at every call.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import LayoutError

if TYPE_CHECKING:
    import torch

Ids = TypeVar("Ids", "npt.NDArray[np.int64]", "torch.Tensor")
"""One of the two kinds of array. A function over `Ids` is type-checked once for each."""

INT64_MAX = 2**63 - 1

# The integers that int64 holds without loss. So uint64 is not among them; bool is a mask.
_ID_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


def check_whole_number(name: str, value: object, *, at_least: int) -> None:
    """Refuse a setting that is not an int or is too small with LayoutError."""
    if type(value) is not int:
        raise LayoutError(
            f"{name} is not a whole number",
            value=f"{value!r} ({type(value).__name__})",
            allowed=f"an int >= {at_least}",
            change="convert it with int()",
        )
    if value < at_least:
        raise LayoutError(
            f"{name} is too small", value=value, allowed=f">= {at_least}", change=f"raise {name}"
        )


def check_rank(name: str, rank: object, cp_size: int) -> None:
    """Refuse a rank outside 0..cp_size-1 with LayoutError."""
    check_whole_number(name, rank, at_least=0)
    if rank not in range(cp_size):
        raise LayoutError(
            f"{name} is not in the group",
            value=rank,
            allowed=f"0..{cp_size - 1}",
            change=f"lower {name} or raise cp_size",
        )


def check_whole_stripes(physical_pages: int, stripe_pages: int) -> None:
    """Refuse a pool size that is not a positive multiple of the stripe with LayoutError."""
    check_whole_number("stripe_pages", stripe_pages, at_least=1)
    check_whole_number("physical_pages", physical_pages, at_least=1)
    if physical_pages % stripe_pages:
        raise LayoutError(
            "physical_pages is not a whole number of stripes",
            value=physical_pages,
            allowed=f"multiples of stripe_pages={stripe_pages}",
            change=f"use {physical_pages - physical_pages % stripe_pages or stripe_pages}",
        )


def admit(kind: str, ids: Ids, *, last: int | None) -> Ids:
    """`ids` as int64, none below 0: negative ones are refused on the host, 0 on an accelerator.

    Any shape. `kind` names the ids in messages ("logical page"); `last` is the largest id, None
    where there is none. Raises what `as_int64` and `check_range` raise.
    """
    ids = as_int64(kind, ids)
    if _on_host(ids):
        check_range(kind, ids, last=last)
        return ids
    return ids.clip(min=0)


def as_int64(kind: str, ids: Ids) -> Ids:
    """`ids` as int64 in the same kind of array; a copy only where the dtype is another.

    LayoutError for anything but a NumPy array or torch tensor of integers.
    """
    if isinstance(ids, np.ndarray):
        _check_dtype(kind, ids.dtype.name)
        return np.asarray(ids, dtype=np.int64)
    if not _is_tensor(ids):
        raise LayoutError(
            f"{kind}s are not in an array",
            value=type(ids).__name__,
            allowed="a NumPy array or a torch tensor",
            change="wrap them with numpy.asarray or torch.as_tensor",
        )
    _check_dtype(kind, str(ids.dtype).removeprefix("torch."))
    return ids.long()


def check_range(kind: str, ids: Ids, *, last: int | None) -> None:
    """LayoutError that names the first id on the host outside 0..last; last None: no bound.

    Ids in accelerator memory are not looked at.
    """
    if not _on_host(ids):
        return
    host = ids if isinstance(ids, np.ndarray) else ids.numpy()
    if host.size == 0 or (host.min() >= 0 and (last is None or host.max() <= last)):
        return
    outside = host < 0 if last is None else (host < 0) | (host > last)
    index = tuple(int(i) for i in np.argwhere(outside)[0])
    raise LayoutError(
        f"{kind} outside the layout",
        value=f"{host[index]} at index {index[0] if len(index) == 1 else index}",
        allowed="0 or more" if last is None else f"0..{last}",
        change="use 0 for padding, and else only ids that were drawn from this pool",
    )


def _on_host(ids: Ids) -> bool:
    """Whether reading `ids` waits for no device."""
    return isinstance(ids, np.ndarray) or ids.device.type == "cpu"


def _is_tensor(value: object) -> bool:
    # No tensor exists before torch is loaded, so this layer need not load it to know.
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(value, torch_module.Tensor)


def _check_dtype(kind: str, dtype_name: str) -> None:
    if dtype_name not in _ID_DTYPES:
        raise LayoutError(
            f"{kind}s are of a dtype that ids cannot have",
            value=dtype_name,
            allowed=", ".join(_ID_DTYPES),
            change="convert them to int64",
        )
