"""A flag for a whole number takes no fraction: cyclopts alone would round it and say nothing."""

from __future__ import annotations

import pytest
from cyclopts import CoercionError

from cp_shared_kv.cli.app import app


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("serve --model-path demo --page-size 64.5", "--page-size"),
        ("serve --model-path demo --max-total-tokens=4096.0", "--max-total-tokens"),
        ("plan glm-5.2 --gpu h200 --cp-size 8.9", "--cp-size"),
        ("trace validate trace.jsonl --most-errors 1.5", "--most-errors"),
        ("simulate trace.jsonl --max-total-tokens 10.5", "--max-total-tokens"),
    ],
)
def test_a_fraction_is_refused(arguments: str, flag: str) -> None:
    with pytest.raises(CoercionError) as refused:
        app.parse_args(arguments, exit_on_error=False, print_error=False)
    assert flag in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        "serve --model-path a.b --page-size 64",
        "plan glm-5.2 --gpu h200 --cp-size 8 --mem-fraction-static 0.85",
    ],
)
def test_whole_numbers_paths_and_fractions_of_flags_that_take_them_pass(arguments: str) -> None:
    app.parse_args(arguments, exit_on_error=False, print_error=False)
