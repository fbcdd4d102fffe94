"""A request's body up to a limit, and the answer to one that is over it."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.disconnect import ClientGoneError

BODY_SECONDS = 300.0
"""For all of a body; a prompt of a million tokens is some 30 MB."""
_LINGER_SECONDS = 5.0


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises `ApiError` 413 without reading it where its length is declared, else
    as soon as it passes the limit; 408 when it takes too long; `ClientGoneError` when the client
    goes before all of it is there."""
    too_large = ApiError(
        413,
        f"the body is larger than {limit_bytes} bytes, which is enough for any prompt that this "
        "server can take",
        code="body_too_large",
    )
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        # RFC 9112, 6.1: a proxy may have believed the one, and sees its next request elsewhere.
        raise ApiError(
            400,
            "the request has both Content-Length and Transfer-Encoding",
            code="ambiguous_length",
            headers={"connection": "close"},
        )
    if int(request.headers.get("content-length", "0")) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(
            408,
            f"the body was not complete within {BODY_SECONDS:g} s",
            code="request_timeout",
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


class LingeringResponse(Response):
    """An answer to a client that is still sending.

    It goes out at once, then what comes in is thrown away for a while: closing a connection with
    unread bytes resets it, and the client would see that instead of the answer.
    """

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002  (ASGI's signature)
        receive: Receive,
        send: Send,
    ) -> None:
        """Send the answer and drop the rest of the request."""
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(self.body), "more_body": True})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_drop(receive), _LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
