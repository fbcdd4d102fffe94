"""Prefix-cache keys of live tokens: one opaque 128-bit value for each full page."""

from __future__ import annotations

import secrets
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import LayoutError

PAGE_KEY_BYTES = 16
# Random for each process, so that nobody can craft two prompts whose pages collide.
_PROCESS_KEY = secrets.token_bytes(32)


def page_keys(token_ids: npt.NDArray[np.integer], page_size: int) -> npt.NDArray[np.void]:
    """Key each full page of a prompt by its token ids; the unaligned tail gets no key.

    A key names the tokens of its own page only. What comes before the page is known from its
    place in the radix tree, so equal pages at different depths are still told apart.

    `token_ids` int[tokens], any integer dtype (equal ids give equal keys whatever the dtype);
    `page_size` in tokens. Returns V16[tokens // page_size]. Keys are comparable within one
    process only: they are keyed BLAKE2b digests under a key drawn at import.

    Raises LayoutError when `token_ids` is not one-dimensional integers or page_size < 1.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise LayoutError(
            "token ids have the wrong form",
            value=f"{ids.dtype}{list(ids.shape)}",
            allowed="a one-dimensional array of integers",
        )
    if page_size < 1:
        raise LayoutError("page size is too small", value=page_size, allowed="at least 1 token")
    page_count = len(ids) // page_size
    encoded = memoryview(ids[: page_count * page_size].astype("<i8").tobytes())
    page_bytes = 8 * page_size
    digests = b"".join(
        blake2b(
            encoded[start : start + page_bytes], digest_size=PAGE_KEY_BYTES, key=_PROCESS_KEY
        ).digest()
        for start in range(0, page_count * page_bytes, page_bytes)
    )
    return np.frombuffer(digests, dtype=f"V{PAGE_KEY_BYTES}")
