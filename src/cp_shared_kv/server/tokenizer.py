"""A checkpoint's tokenizer: `tokenizer.json` by the tokenizers library, without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import tokenizers

from cp_shared_kv.errors import CheckpointError


class Tokenizer:
    """Text to token ids and back. Its methods may be called from several threads at once."""

    def __init__(self, backend: tokenizers.Tokenizer, bos_token_id: int | None = None) -> None:
        # A checkpoint may carry its training settings; a prompt must not be cut or filled up.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_token_id = bos_token_id
        added = backend.get_added_tokens_decoder()
        self._special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Load `tokenizer.json` of a Hugging Face model directory.

        `tokenizer_config.json` is read for one thing: `add_bos_token`, which transformers honours
        when the tokenizer is loaded and which therefore is not always in `tokenizer.json` itself
        (DeepSeek's is such a one). Raises `CheckpointError` when a file is missing or damaged.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                "the model directory has no tokenizer.json",
                value=directory,
                change="point --model-path at a complete Hugging Face checkpoint",
            )
        try:
            # The library raises plain Exception for whatever it cannot read.
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise CheckpointError(
                f"tokenizer.json is damaged ({error})", value=path, change="fetch the file again"
            ) from error
        config_path = directory / "tokenizer_config.json"
        if not config_path.is_file():
            return cls(backend)
        adds_bos, bos_token = _bos_settings(config_path)
        if not adds_bos:
            return cls(backend)
        bos_token_id = None if bos_token is None else backend.token_to_id(bos_token)
        if bos_token_id is None:
            raise CheckpointError(
                "tokenizer_config.json has add_bos_token, but its bos_token is not in "
                "tokenizer.json",
                value=bos_token or "no bos_token",
                change="fetch both files again, or set add_bos_token to false",
            )
        return cls(backend, bos_token_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the checkpoint puts around a text.

        That is what SGLang and vLLM do for completions, so prompts meet the model as it was
        trained. A beginning-of-sequence token that the text already spells out is not doubled.
        """
        token_ids = self._backend.encode(text, add_special_tokens=True).ids
        if self._bos_token_id is not None and token_ids[:1] != [self._bos_token_id]:
            return [self._bos_token_id, *token_ids]
        return token_ids

    def encode_as_written(self, text: str) -> list[int]:
        """Token ids of a text that spells out its own special tokens, as chat templates do."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def raw_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that only the model has."""
        return self._backend.id_to_token(token_id)

    def has_text(self, token_id: int) -> bool:
        """Whether the token shows in decoded text: special ones do not, nor do ids that only the
        model has (its vocabulary is often rounded up)."""
        known = self._backend.id_to_token(token_id) is not None
        return known and token_id not in self._special_token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, of which those without text (`has_text`) are passed over."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)


def _bos_settings(path: Path) -> tuple[bool, str | None]:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(
            f"tokenizer_config.json is damaged ({error})", value=path, change="fetch the file again"
        ) from None
    token: object = config.get("bos_token")
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    return config.get("add_bos_token") is True, token if isinstance(token, str) else None
