"""Addresses that other hosts are told."""

from __future__ import annotations

import ipaddress

from cp_shared_kv.errors import ConfigError


def check_host(flag: str, host: str) -> None:
    """ConfigError unless it is an IPv4 address that other hosts can connect to."""
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_multicast:
        raise ConfigError(
            f"{flag} is no address that others could connect to",
            value=repr(host[:80]),
            allowed="an IPv4 address of this host, such as 10.0.0.5",
        )
