"""Whether there is an SGLang to test with; without one, this is the only test of the folder."""

from __future__ import annotations

import importlib.util

import pytest

from cp_shared_kv.integrations.sglang import versions


def test_sglang_is_a_release_that_the_plugin_knows() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here; make test-sglang installs it")

    assert versions.installed_version() in versions.SUPPORTED
