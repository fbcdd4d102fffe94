"""What the user chooses about the HTTP server itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """By the names of the flags of `cpkv serve`."""

    api_key: str | None = field(default=None, repr=False)
    enable_metrics: bool = False
