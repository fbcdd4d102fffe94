"""One log line for each HTTP request, with its id, times and token counts; never its prompt."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cp_shared_kv.server.api_error import SERVER_STOPPING, ApiError
from cp_shared_kv.server.metrics import ServerMetrics

access_logger = logging.getLogger("cp_shared_kv.server.access")
error_logger = logging.getLogger("cp_shared_kv.server")

CLIENT_GONE = 499
"""Status, in log and metrics alone, of a request whose client did not wait for the answer."""

_STATE_KEY = "request_record"
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PROBED = frozenset({"/health", "/metrics", "/dashboard/state"})
"""Paths that monitors and open pages ask every few seconds: logged at DEBUG."""


@dataclass
class RequestRecord:
    """What becomes known of a request on its way; the log line is made from it."""

    request_id: str
    """The client's x-request-id where it sent a sound one; goes back in the same header."""
    arrived: float = field(default_factory=time.perf_counter)
    """Seconds on the perf_counter clock."""
    notes: dict[str, object] = field(default_factory=dict[str, object])
    """Further fields of the line, by name."""
    completion_tokens: int = 0
    """Of all choices."""
    client_gone: bool = False

    @property
    def age_seconds(self) -> float:
        """How long ago the request arrived."""
        return time.perf_counter() - self.arrived


def record_of(request: Request) -> RequestRecord:
    """The record that `AccessLog` keeps of this request."""
    record: RequestRecord = request.scope["state"][_STATE_KEY]
    return record


class AccessLog:
    """Outermost ASGI layer: request ids, the log line, response counts, and the answer to a bug."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given_id = Headers(scope=scope).get("x-request-id", "")
        record = RequestRecord(given_id if _ACCEPTED_ID.fullmatch(given_id) else uuid.uuid4().hex)
        scope.setdefault("state", {})[_STATE_KEY] = record
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if status is not None:
                raise
            await SERVER_STOPPING.response()(scope, receive, send_with_id)
        except Exception:
            error_logger.exception("request %s met a bug of the server", record.request_id)
            if status is not None:
                raise
            bug = ApiError(500, "internal error; the server's log has more", code="internal_error")
            await bug.response()(scope, receive, send_with_id)
        finally:
            self._write(scope, record, CLIENT_GONE if record.client_gone else status)

    def _write(self, scope: Scope, record: RequestRecord, status: int | None) -> None:
        path: str = scope["path"]
        # Clients can invent paths without end; each would stay in the metrics for ever.
        self._metrics.responses[path if path in self._paths else "other", str(status)] += 1
        level = logging.DEBUG if path in _PROBED else logging.INFO
        if not access_logger.isEnabledFor(level):
            return
        client: Any = scope.get("client")
        fields: dict[str, object] = {
            "request_id": record.request_id,
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(time.perf_counter() - record.arrived, 6),
            **record.notes,
        }
        access_logger.log(level, "%s", json.dumps(fields))
