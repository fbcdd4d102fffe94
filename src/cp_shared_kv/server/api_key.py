"""One key for all clients, as `Authorization: Bearer KEY`."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cp_shared_kv.server.api_error import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/openapi.json", "/docs"})
"""Paths that need no key: the two that monitors ask, as in SGLang, and what is the same on every
server. /health_generate needs it, other than in SGLang, for it makes the engine work."""

_UNAUTHORISED = ApiError(
    401,
    "no valid API key; send the server's --api-key as `Authorization: Bearer KEY`",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)


class ApiKey:
    """ASGI layer that answers 401 to requests without the key. The key is never logged."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse before anything is read."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        else:
            await _UNAUTHORISED.response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # The time of the comparison tells nothing about how much of a guess was right.
        right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
        return right and scheme.lower() == "bearer"
