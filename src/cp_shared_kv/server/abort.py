"""POST /abort_request: end answers from outside, by the names that their clients gave them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cp_shared_kv.server.access_log import record_of
from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.disconnect import ClientGoneError
from cp_shared_kv.server.json_body import decode_body
from cp_shared_kv.server.request_body import read_body
from cp_shared_kv.server.under_way import AnswersUnderWay

BODY_BYTES = 1 << 16


class AbortBody(msgspec.Struct):
    """POST /abort_request, as in SGLang.

    `rid` is a request's own `rid` or `request_id`, its x-request-id, or the `id` of its answer.
    """

    rid: str | None = None
    abort_all: bool | None = None


class Aborted(msgspec.Struct):
    """How many answers were ended. None is no error: they may have been over."""

    aborted_requests: int


@dataclass(frozen=True)
class AbortRequests:
    """The endpoint and what it needs."""

    under_way: AnswersUnderWay

    async def create(self, request: Request) -> Response:
        """End the answers of one name, or all."""
        try:
            body = decode_body(await read_body(request, BODY_BYTES), AbortBody)
        except ClientGoneError:
            record_of(request).client_gone = True
            return Response(status_code=204)
        if body.abort_all:
            aborted = self.under_way.abort_all()
        elif body.rid is not None:
            aborted = self.under_way.abort(body.rid)
        else:
            raise ApiError(400, "rid is missing; or send abort_all: true", param="rid")
        return Response(msgspec.json.encode(Aborted(aborted)), media_type="application/json")
