"""The formats by name: sizes at the production models' widths, fingerprints, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PageFormat

LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "page_size": 64,
    "rope_style": "interleaved",
    "rope_pairing": "interleaved",
}
INDEX: dict[str, Any] = {
    "index_head_dim": 128,
    "page_size": 64,
    "rope_style": "half-split",
    "rope_pairing": "half-split",
}
OTHER = {
    "kv_lora_rank": 640,
    "qk_rope_head_dim": 32,
    "page_size": 32,
    "index_head_dim": 64,
    "interleaved": "half-split",
    "half-split": "interleaved",
}
NAMES = [
    *[(latent_format, name) for name in ("fp32", "bf16", "fp8_ds_mla")],
    *[(index_format, name) for name in ("fp32", "bf16", "fp8_scaled")],
]


@pytest.mark.parametrize(
    ("page_format", "sections", "row_bytes", "page_bytes"),
    [
        (latent_format("fp32", **LATENT), 1, 2304, 147_456),
        (latent_format("bf16", **LATENT), 1, 1152, 73_728),
        (latent_format("fp8_ds_mla", **LATENT), 1, 656, 41_984),
        (index_format("fp32", **INDEX), 1, 512, 32_768),
        (index_format("bf16", **INDEX), 1, 256, 16_384),
        (index_format("fp8_scaled", **INDEX), 2, 132, 8_448),
    ],
    ids=lambda value: value.fingerprint.split()[0] if isinstance(value, PageFormat) else "",
)
def test_sizes_at_the_widths_of_the_production_models(
    page_format: PageFormat, sections: int, row_bytes: int, page_bytes: int
) -> None:
    assert len(page_format.sections) == sections
    assert (page_format.row_bytes, page_format.page_bytes) == (row_bytes, page_bytes)


def test_a_fingerprint_changes_with_everything_that_changes_the_meaning_of_a_byte() -> None:
    seen: list[str] = []
    for make, name in NAMES:
        arguments = LATENT if make is latent_format else INDEX
        seen.append(make(name, **arguments).fingerprint)
        assert make(name, **arguments).fingerprint == seen[-1]
        for changed, value in arguments.items():
            other = OTHER[changed if isinstance(value, int) else value]
            if (name, changed) != ("fp8_scaled", "index_head_dim"):  # which has one width only
                seen.append(make(name, **{**arguments, changed: other}).fingerprint)
    assert len(seen) == 2 * 3 + 3 * 5 + 3 * 4 - 1
    assert len(set(seen)) == len(seen)
    assert all("hadamard=no" in fingerprint for fingerprint in seen)


@pytest.mark.parametrize(("make", "name"), NAMES)
def test_the_kind_of_scale_is_in_the_fingerprint_of_formats_that_have_one(
    make: Any, name: str
) -> None:
    arguments = LATENT if make is latent_format else INDEX
    plain = make(name, **arguments).fingerprint
    powers = make(name, **arguments, scale_kind="power-of-two").fingerprint
    if name.startswith("fp8"):
        assert "scale=fp32" in plain
        assert "scale=power-of-two" in powers
    else:
        assert "scale=none" in plain
        assert plain == powers


def test_unknown_formats_are_refused_with_what_is_known() -> None:
    with pytest.raises(ConfigError, match="page format: fp4; allowed: fp32, bf16, fp8_ds_mla"):
        latent_format("fp4", kv_lora_rank=8, qk_rope_head_dim=4, page_size=2)
    with pytest.raises(ConfigError, match="page format: fp4; allowed: fp32, bf16, fp8_scaled"):
        index_format("fp4", index_head_dim=8, page_size=2)
