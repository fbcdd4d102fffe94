"""The flag on SGLang's own command line, the field behind it, and the gate that follows parsing."""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.integrations.sglang import ATTRIBUTE, FLAG, settings, verify, versions
from cp_shared_kv.integrations.sglang.settings import ALL_RANKS_SEND, RUN_WITH_FLAG
from cp_shared_kv.integrations.sglang.support import refusals

_log = logging.getLogger(__name__)
# SGLang's own tests parse with these, and it validates nothing of them itself.
_NO_MODEL = ("none", "dummy")


@dataclasses.dataclass
class _Field:
    enable_nsa_prefill_cp_shared_kv: bool = False


def add_field() -> None:
    """Make the flag a field of ServerArgs, as if it had been declared there.

    So it goes with from_cli_args, dataclasses.replace and asdict by itself, and with pickle into
    child processes. Repeating it does nothing.
    """
    from sglang.srt.server_args import ServerArgs

    (field,) = dataclasses.fields(_Field)
    assert field.name == ATTRIBUTE
    fields: dict[str, dataclasses.Field[Any]] = ServerArgs.__dataclass_fields__
    fields.setdefault(ATTRIBUTE, field)
    setattr(ServerArgs, ATTRIBUTE, False)


def add_argument(_result: None, parser: argparse.ArgumentParser) -> None:
    """After ServerArgs.add_cli_args: the flag, if the gate behind it is in place.

    Where it is not, the flag stays unknown, and a server that is given it does not start.
    """
    missing = verify.unapplied_door()
    if missing:
        _log.error("%s is not offered: not applied: %s", FLAG, ", ".join(missing))
        return
    parser.add_argument(
        FLAG,
        action="store_true",
        default=False,
        help="Share one logical KV pool between the ranks of a prefill CP group: N ranks, N times "
        "the capacity (cp-shared-kv). For prefill servers of DSA models; see docs/sglang.md.",
    )


def construct(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Around ServerArgs.__init__: the field, set before __post_init__ runs."""
    setattr(self, ATTRIBUTE, bool(kwargs.pop(ATTRIBUTE, False)))
    original(self, *args, **kwargs)


def validate(_result: None, self: Any) -> None:
    """After ServerArgs.__post_init__: refuse what does not go with the flag, set what must be.

    ConfigError with all the reasons at once.
    """
    if not getattr(self, ATTRIBUTE, False) or self.model_path.lower() in _NO_MODEL:
        return
    reasons = [str(refusal) for refusal in refusals(self, dsa_model=_is_dsa(self))]
    reasons += verify.why_unfit(versions.installed_version())
    try:
        settings.read()
    except ConfigError as error:
        reasons.append(str(error))
    if reasons:
        raise ConfigError(
            f"{FLAG} cannot be used with these settings",
            value="".join(f"\n  - {reason}" for reason in reasons),
        )
    for line in apply_settings(self):
        _log.warning("CP shared KV: %s", line)


def apply_settings(args: Any) -> list[str]:
    """Set what the flag needs, here and for child processes; say each in a line."""
    os.environ[RUN_WITH_FLAG] = "1"
    said: list[str] = []
    for name in ("disable_cuda_graph", "disable_piecewise_cuda_graph"):
        if not getattr(args, name):
            setattr(args, name, True)
            said.append(f"{name} = True, since reads are planned for each batch")
    if not settings.all_ranks_send():
        os.environ[ALL_RANKS_SEND] = "1"
        said.append(
            f"{ALL_RANKS_SEND} = 1, since each rank sends the pages it owns; "
            "decode servers need the same in their environment"
        )
    return said


def _is_dsa(args: Any) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_nsa

    return bool(is_deepseek_nsa(args.get_model_config().hf_config))
