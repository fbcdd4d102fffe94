"""A checkpoint's chat template: messages to the text that the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from cp_shared_kv.errors import CheckpointError, CpkvError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_REASON_CHARACTERS = 300


class ChatTemplateError(CpkvError):
    """Messages that the template does not take, in the template's own words where it has some."""


class ChatTemplate:
    """Renders messages. May be called from several threads at once.

    Templates are programs that come with a checkpoint, so they run in jinja's sandbox, where they
    reach no attribute that begins with an underscore and change nothing that they are given. They
    find what Hugging Face's transformers gives them: `messages`, `add_generation_prompt`, the
    special tokens, `raise_exception`, `strftime_now`, `tojson` that leaves HTML alone, loop
    controls, and blocks marked as `generation`.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        file: Path | None = None,
    ) -> None:
        """Raises `CheckpointError`, with the file that it is from, for one that is no template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlocks],
        )
        environment.filters["tojson"] = _tojson
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(
                source, {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
            )
        # Jinja makes a Python program of it, and Python has its own refusals: a break outside a
        # loop, blocks or brackets nested too deep.
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint's chat template is damaged ({_reason(error)})",
                value=file,
                change="fetch it again",
            ) from None

    @property
    def reserved(self) -> frozenset[str]:
        """Names that only the server gives to a template."""
        return frozenset({"messages", "add_generation_prompt", "tools", "documents"}).union(
            self._special_tokens
        )

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate | None:
        """The template of a Hugging Face model directory: `chat_template.jinja`, else the entry
        of `tokenizer_config.json`, there the one named `default` if it has several. None where
        there is neither."""
        path = directory / "tokenizer_config.json"
        config: dict[str, Any] = {}
        if path.is_file():
            try:
                config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            except (OSError, msgspec.DecodeError, RecursionError) as error:
                raise CheckpointError(
                    f"tokenizer_config.json is damaged ({error})",
                    value=path,
                    change="fetch the file again",
                ) from None
        file = directory / "chat_template.jinja"
        if not file.is_file():
            source, file = _template_in(config), path
        else:
            try:
                source = file.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(
                    f"the checkpoint's chat template cannot be read ({_reason(error)})",
                    value=file,
                    change="fetch it again",
                ) from None
        return None if source is None else cls(source, _special_tokens(config), file=file)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text, with its special tokens spelled out. Raises `ChatTemplateError`."""
        try:
            return self._template.render(
                {
                    **(extra or {}),
                    **self._special_tokens,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None,
                    "documents": None,
                }
            )
        # A program of somebody else's: it may fail in any way on messages it was not made for.
        except Exception as error:
            raise ChatTemplateError(
                "the checkpoint's chat template does not take these messages", value=_reason(error)
            ) from None


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what a model is trained to say. Nothing
    here asks which part that is, so the block is its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Called by jinja at the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]


def _template_in(config: Mapping[str, Any]) -> str | None:
    given: object = config.get("chat_template")
    if isinstance(given, list):
        named = [entry for entry in cast("list[Any]", given) if isinstance(entry, dict)]
        found = [entry.get("template") for entry in named if entry.get("name") == "default"]
        given = found[-1] if found else None
    return given if isinstance(given, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token: object = config.get(name)
        if isinstance(token, dict):
            token = cast("dict[str, object]", token).get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _tojson(value: object, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
