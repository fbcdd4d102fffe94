"""The transports by name: what ends at this host is refused for others."""

from __future__ import annotations

import pytest

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.transfer.transports import make_target, make_transport


def test_shared_memory_is_refused_where_other_hosts_are_to_be_reached() -> None:
    with pytest.raises(ConfigError, match=r"does not leave its host.*mooncake"):
        make_transport("shared_memory", "rank-0", other_hosts=True)
    with pytest.raises(ConfigError, match=r"does not leave its host.*mooncake"):
        make_target("shared_memory", "decode-0", host="192.0.2.7")
