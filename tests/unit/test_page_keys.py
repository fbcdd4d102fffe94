"""Keys of live tokens: one a full page, equal exactly when the page's tokens are."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.memory.page_keys import page_keys


def test_one_key_for_each_full_page_and_none_for_the_tail() -> None:
    for tokens, pages in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2)):
        keys = page_keys(np.arange(tokens), page_size=4)
        assert keys.dtype == np.dtype("V16")
        assert len(keys) == pages


def test_equal_pages_have_equal_keys_and_a_changed_token_changes_its_page_alone() -> None:
    tokens = np.array([5, 6, 7, 5, 6, 7, 5, 6, 8])
    first, second, third = page_keys(tokens, page_size=3)
    assert first == second
    assert first != third


def test_prompts_that_share_one_and_a_half_pages_share_one_key() -> None:
    a = page_keys(np.arange(16), page_size=8)
    b = page_keys(np.where(np.arange(16) < 12, np.arange(16), -1), page_size=8)
    assert (a == b).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint32, ">i8"])
def test_keys_do_not_depend_on_the_dtype_of_the_token_ids(dtype: str) -> None:
    ids = np.arange(12)
    assert (page_keys(ids.astype(dtype), 4) == page_keys(ids, 4)).all()


def test_strided_token_ids_are_read_by_value() -> None:
    assert (page_keys(np.arange(24)[::2], 4) == page_keys(np.arange(0, 24, 2), 4)).all()


def test_keys_are_secret_to_the_process() -> None:
    script = (
        "import numpy as np; from cp_shared_kv.memory.page_keys import page_keys;"
        "print(page_keys(np.arange(4), 4).tobytes().hex())"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert other.stdout.decode().strip() != page_keys(np.arange(4), 4).tobytes().hex()


@pytest.mark.parametrize(
    ("token_ids", "page_size"),
    [(np.zeros(4), 2), (np.zeros((2, 2), np.int64), 2), (np.arange(4), 0)],
)
def test_wrong_forms_are_refused(token_ids: np.ndarray, page_size: int) -> None:
    with pytest.raises(LayoutError):
        page_keys(token_ids, page_size)
