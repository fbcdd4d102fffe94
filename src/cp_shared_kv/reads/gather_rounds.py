"""How far a collective read packs ahead: what bounds its buffer, whatever the prefix."""

from __future__ import annotations

PAGES_PER_ROUND = 16
"""Pages that each rank gives to one all-gather."""
