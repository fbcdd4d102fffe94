"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cp_shared_kv.engine.api import EngineRefusal

_RETRY_AFTER_SECONDS = "1"


class ApiError(Exception):
    """An answer other than success. `message` never repeats a prompt."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        super().__init__(message)

    @classmethod
    def from_refusal(cls, refusal: EngineRefusal) -> ApiError:
        """The HTTP answer to a request that the engine refused or could not finish."""
        match refusal.kind:
            case "too_long":
                return cls(400, refusal.reason, param="prompt", code="context_length_exceeded")
            case "invalid":
                return cls(400, refusal.reason, code="invalid_value")
            case "overloaded" | "unavailable":
                headers = {"retry-after": _RETRY_AFTER_SECONDS}
                return cls(503, refusal.reason, code=refusal.kind, headers=headers)
            case "failed":
                return cls(500, refusal.reason, code="request_failed")

    @property
    def type(self) -> str:
        """Whose fault it is, in OpenAI's words."""
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        """The error as JSON."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        """The error as a whole HTTP response."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


STOPPING = "the server is stopping"
SERVER_STOPPING = ApiError(
    503,
    STOPPING,
    code="unavailable",
    # The client's next connection may lead to a server that stays.
    headers={"retry-after": _RETRY_AFTER_SECONDS, "connection": "close"},
)
"""To those who come too late, or still wait when the server will not wait any longer."""


async def answer_api_error(_request: Request, error: Exception) -> Response:
    """Exception handler of the application for `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for what the routing itself refuses: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    messages = {
        404: "no such path; /docs lists all that there are",
        405: f"{request.method} is not allowed here; allowed: {allowed}",
    }
    message = messages.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()
