"""A server that others can reach without a key says so once, at its start."""

from __future__ import annotations

import pytest

from cp_shared_kv.server.exposure import warn_of_exposure
from cp_shared_kv.server.serve import open_listener


@pytest.mark.parametrize(
    ("host", "has_api_key", "warned"),
    [
        ("0.0.0.0", False, True),
        ("0.0.0.0", True, False),
        ("127.0.0.1", False, False),
        ("127.0.0.2", False, False),
        ("localhost", False, False),
        ("::", False, True),
        ("::1", False, False),
    ],
)
def test_who_is_warned(caplog, host, has_api_key, warned):
    listener = open_listener(host, 0)
    warn_of_exposure(listener, has_api_key=has_api_key)
    listener.close()
    assert ("without an API key" in caplog.text) == warned
    assert len(caplog.records) == warned
