"""Each trap of Mooncake's Transfer Engine, on the real one, and that the transport closes it.

A test whose name begins with "the engine" shows that a trap is there: if it fails, a later release
has closed it, and the transport may need less.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cp_shared_kv.errors import StartupError
from cp_shared_kv.testing.transport_ends import TransportEnds
from cp_shared_kv.transfer.mooncake import MooncakeEngine

from .two_ends import LARGE, SMALL


@pytest.fixture(scope="module", autouse=True)
def wheel() -> None:
    """Skips where the wheel cannot be loaded, and says why."""
    try:
        MooncakeEngine("127.0.0.1")
    except StartupError as error:
        pytest.skip(str(error))


@pytest.fixture
def small() -> Iterator[TransportEnds]:
    with TransportEnds("mooncake", SMALL) as ends:
        yield ends


@pytest.fixture
def large() -> Iterator[TransportEnds]:
    with TransportEnds("mooncake", LARGE) as ends:
        yield ends
