"""An empty argument is a shell variable that was not set, and no path; bytes that are no text."""

from __future__ import annotations

import pytest

from cp_shared_kv.cli.app import refuse_empty, refuse_undecodable
from cp_shared_kv.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["keys", ""], "the argument after keys is empty"),
        (["serve", "--model-path", ""], "the argument after --model-path is empty"),
        (["serve", "--model-path=", "--port=0"], "--model-path is empty"),
        ([""], "the argument after cpkv is empty"),
    ],
)
def test_an_empty_argument_is_refused_by_where_it_stands(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_empty(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve", "--model-path=a=", "--port", "0"],
        ["keys", "="],
        ["sglang", "serve", "--a", ""],
    ],
)
def test_other_arguments_pass(arguments: list[str]) -> None:
    refuse_empty(arguments)


def test_bytes_that_are_no_text_are_refused_and_shown_in_ascii() -> None:
    with pytest.raises(ConfigError, match=r"no UTF-8: '--model-path=/m\\udcff'; to change it: "):
        refuse_undecodable(["serve", "--model-path=/m\udcff"])
    refuse_undecodable(["serve", "--model-path=/mé€"])
    refuse_undecodable(["sglang", "serve", "--model-path=/m\udcff"])
