"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

import re

from cp_shared_kv.server.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_characters() -> dict[str, int]:
    """The byte behind each character of the alphabet in which byte-level BPE vocabularies are
    written: printable Latin-1 stands for itself, the rest is counted up from U+0100 (the GPT-2
    tokenizer's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(0x100 + place): byte for place, byte in enumerate(hidden)
    }


_BYTES = _byte_characters()


class TokenTexts:
    """What single tokens of a vocabulary stand for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """The token alone: U+FFFD where it is part of a character, `<|name|>` for special ones,
        `token_id:N` for what the tokenizer does not know."""
        raw = self._tokenizer.raw_token(token_id)
        if raw is None:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id]) if self._tokenizer.has_text(token_id) else raw

    def utf8(self, token_id: int) -> bytes | None:
        """The bytes that the token adds to a text; None where they cannot be told."""
        text = self.text(token_id)
        if _REPLACEMENT not in text:
            return text.encode()
        raw = self._tokenizer.raw_token(token_id) or ""
        if byte := _BYTE_TOKEN.fullmatch(raw):
            return bytes([int(byte[1], 16)])
        if all(character in _BYTES for character in raw):
            return bytes(_BYTES[character] for character in raw)
        return None

    def unique_text(self, token_id: int) -> str:
        """As `text`, but parts of characters are told apart as `bytes:\\xe2\\x82`, as in OpenAI's
        completions."""
        text = self.text(token_id)
        utf8 = self.utf8(token_id)
        if _REPLACEMENT not in text or utf8 is None:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)
