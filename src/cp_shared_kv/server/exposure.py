"""Who can reach the server: said at the start where it is more than one would think."""

from __future__ import annotations

import ipaddress
import logging
import socket

from cp_shared_kv.engine.config_values import API_KEY_VARIABLE

logger = logging.getLogger("cp_shared_kv.server")


def warn_of_exposure(listener: socket.socket, *, has_api_key: bool) -> None:
    """Log a warning if other machines can reach `listener` and nothing asks them for a key."""
    host, port = listener.getsockname()[:2]
    if has_api_key or ipaddress.ip_address(host).is_loopback:
        return
    logger.warning(
        "the server listens at %s port %d without an API key: whoever reaches this address can use "
        "the model, read /metrics and /server_info, empty the cache and abort requests; give it "
        "--api-key or %s, or --host 127.0.0.1 and a proxy in front (SECURITY.md)",
        host,
        port,
        API_KEY_VARIABLE,
    )
