"""The page at / and the figures behind it. The page asks for them every two seconds."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from importlib import resources

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from cp_shared_kv.engine.api import EngineDescription
from cp_shared_kv.server.current_figures import current_page_maps, current_stats
from cp_shared_kv.server.dashboard_state import dashboard_state, most_bins
from cp_shared_kv.server.engine_client import EngineClient

SOURCES = resources.files("cp_shared_kv.server") / "dashboard_page"


class Dashboard:
    """Both endpoints. The page itself is the same on every server and holds no figure."""

    def __init__(self, client: EngineClient, description: EngineDescription) -> None:
        self._client, self._description = client, description
        self._html = page_html()
        self._headers = {
            "content-security-policy": content_security_policy(self._html),
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
        }

    async def page(self, _request: Request) -> Response:
        """GET /."""
        return HTMLResponse(self._html, headers=self._headers)

    async def state(self, _request: Request) -> Response:
        """GET /dashboard/state."""
        stats, pools = await asyncio.gather(
            current_stats(self._client),
            current_page_maps(self._client, most_bins(self._description)),
        )
        state = dashboard_state(
            self._description, self._client.healthy(), stats, self._client.units(), pools
        )
        return Response(
            msgspec.json.encode(state),
            media_type="application/json",
            headers={"cache-control": "no-store"},
        )


def page_html() -> str:
    """The page with its style and script in it: one answer, nothing else to fetch."""
    html = (SOURCES / "page.html").read_text("utf-8")
    for name in ("style.css", "script.js"):
        html = html.replace(f"/* {name} */", (SOURCES / name).read_text("utf-8"))
    return html


def content_security_policy(html: str) -> str:
    """Nothing runs, styles or is fetched but the page's own script and style, by their hashes, and
    this server's answers."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(html, 'script')}",
            f"style-src {_hashes(html, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _hashes(html: str, tag: str) -> str:
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
    digests = (hashlib.sha256(part.encode()).digest() for part in parts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
