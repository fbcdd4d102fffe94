"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is complete first; of several that end together, the longest.

    What it gives out is certain: text that may be the beginning of a stop string is held back.
    The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._longest = max(map(len, strings), default=0)
        self._held = ""
        self.matched: str | None = None
        """The string that was found; the text before it has been given out then."""

    def push(self, text: str) -> str:
        """The text that is certain now; nothing may follow once `matched` is set."""
        if not self._strings:
            return text
        text = self._held + text
        found = [(text.find(string) + len(string), string) for string in self._strings]
        ends = [(end, -len(string), string) for end, string in found if end >= len(string)]
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return text[: end - len(self.matched)]
        certain = len(text) - self._overlap(text)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        rest, self._held = self._held, ""
        return rest

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0
