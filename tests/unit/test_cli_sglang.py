"""`cpkv sglang` where there is no SGLang."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cp_shared_kv.integrations.sglang import versions


@pytest.mark.parametrize("installed", [None, "0.5.23"])
def test_the_doctor_names_the_next_step(
    cpkv: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    installed: str | None,
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: installed)
    code, out, _ = cpkv("sglang", "doctor")
    assert code == 1
    assert out.startswith(f"BAD  SGLang: {installed or 'not installed'} (tested: ")
    assert out.splitlines()[-1].startswith("next: run this with the Python of SGLang's environment")
    assert "pip install sglang==0.5.11" in out
