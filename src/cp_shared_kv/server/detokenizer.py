"""Text of a token stream, piece by piece, such that the pieces add up to the text of the whole.

Why not `tokenizers.decoders.DecodeStream`: it gives nothing while the text ends in U+FFFD, so
output that is not UTF-8 (a small or broken model) never appears and every step decodes all of it
again, and it has no end-of-stream, so a last incomplete character is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from cp_shared_kv.server.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER_TOKENS = 4
"""UTF-8 takes at most four bytes, and a token has at least one."""


class StreamDecoder:
    """Decodes one stream of output tokens.

    Tokens are decoded in a short window: those since the last piece of text, and those of that
    piece, because a decoder may treat the first token of a text in another way (a leading space).
    While the window's text ends in U+FFFD, bytes of a character may still be on their way and the
    text is held back; but no longer than a character can take. Then the bytes are what they are,
    and all is given but the last U+FFFD, which alone may yet turn into a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = 0
        """Characters of the window's text that are given out."""
        self._waiting = 0
        """Tokens since the text last ended in a whole character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain; may be empty."""
        return "".join(self._push(token_id) for token_id in token_ids)

    def flush(self) -> str:
        """What is left at the end of the stream: U+FFFD for a character cut short."""
        rest = self._tokenizer.decode(self._window)[self._given :]
        self._window, self._given, self._waiting = [], 0, 0
        return rest

    def _push(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        self._waiting += 1
        text = self._tokenizer.decode(self._window)
        if not text.endswith(_REPLACEMENT):
            piece = text[self._given :]
            self._window = self._window[-self._waiting :]
            self._given = len(self._tokenizer.decode(self._window))
            self._waiting = 0
            return piece
        if self._waiting < _LONGEST_CHARACTER_TOKENS:
            return ""
        piece = text[self._given : -1]
        self._waiting = _LONGEST_CHARACTER_TOKENS - 1
        self._window = self._window[-self._waiting :]
        self._given = len(self._tokenizer.decode(self._window)) - 1
        return piece
