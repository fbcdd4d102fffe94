"""A tokenizer with one token a byte: any text round-trips, and its length in tokens is known."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_TOKEN = "<|end|>"  # noqa: S105 - a token of text, not a secret


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown}
    table.update({byte: chr(256 + place) for place, byte in enumerate(hidden)})
    return [table[byte] for byte in range(256)]


VOCABULARY: dict[str, int] = {
    **{character: byte for byte, character in enumerate(_byte_characters())},
    END_TOKEN: 256,
}


def byte_tokenizer(*special_tokens: str) -> Tokenizer:
    """Token b is byte b, tokens from 256 on are the special ones, `<|end|>` where none is named.

    Nothing is added before or after a text.
    """
    bytes_only = {token: index for token, index in VOCABULARY.items() if token != END_TOKEN}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_only, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = special_tokens or (END_TOKEN,)
    specials = [AddedToken(token, special=True, normalized=False) for token in named]
    tokenizer.add_special_tokens(specials)
    return tokenizer
