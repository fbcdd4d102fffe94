"""How much scratch is set aside: for one batch, which can always be a whole context."""

from __future__ import annotations

import pytest

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.integrations.sglang.capacity import ScratchSize
from cp_shared_kv.integrations.sglang.page_formats import pool_spec
from cp_shared_kv.integrations.sglang.settings import SCRATCH_TOKENS, scratch_tokens


def test_a_context_and_a_chunk_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SCRATCH_TOKENS, raising=False)
    assert scratch_tokens(163_840, 8_192) == 172_032
    monkeypatch.setenv(SCRATCH_TOKENS, "400000")
    assert scratch_tokens(163_840, 8_192) == 400_000


@pytest.mark.parametrize("text", ["163839", "-1", "many"])
def test_less_than_a_context_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(SCRATCH_TOKENS, text)
    with pytest.raises(ConfigError, match="163840 or more, the longest context"):
        scratch_tokens(163_840, 8_192)


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_of_both_kinds_a_page_of_padding_each_and_the_gather(layers: int) -> None:
    spec = pool_spec(576, 512, 64, 128, 78)

    size = ScratchSize.of(spec, 172_032, 8, layers)

    assert size.batch_pages == 2_688
    assert size.limit_bytes == layers * 2_689 * (73_728 + 8_448) + 16 * 9 * 73_728


@pytest.mark.parametrize(("width", "row_bytes"), [(576, 1152), (656, 656)])
def test_rows_as_sglang_counts_them(width: int, row_bytes: int) -> None:
    spec = pool_spec(width, 512, 64, 128, 3)

    assert spec.latent.row_bytes == row_bytes
    assert spec.index.page_bytes == 8_448
    assert spec.bytes_per_page == 3 * (64 * row_bytes + 8_448)


def test_rows_of_another_layout_are_refused() -> None:
    with pytest.raises(ConfigError, match="bytes of a latent KV row"):
        pool_spec(640, 512, 64, 128, 3)
