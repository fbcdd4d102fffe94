"""What `cpkv sglang doctor` finds out: whether this SGLang fits, and what a command line lacks."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.integrations.sglang import ATTRIBUTE, FLAG, settings, verify, versions
from cp_shared_kv.integrations.sglang.settings import ALL_RANKS_SEND

ENTRY_POINT_GROUP = "sglang.srt.plugins"


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what, whether it is as it must be, and how it is."""

    what: str
    good: bool
    detail: str


def check_installation() -> list[Finding]:
    """The release, its sources, the entry point. Nothing of SGLang is imported."""
    version = versions.installed_version()
    known = versions.release(version) is not None
    findings = [
        Finding("SGLang", known, f"{version or 'not installed'} (tested: {_tested()})"),
        Finding("torch", True, importlib.metadata.version("torch")),
        _entry_point(),
    ]
    if known:
        unfit = verify.why_unfit(version)
        detail = f"{len(verify.fingerprinted())} functions and classes as tested"
        findings.append(Finding("sources", not unfit, "\n".join(unfit) or detail))
    return findings


def check_command_line(argv: Sequence[str]) -> list[Finding]:
    """What a server with these arguments would be told, parsed by SGLang itself.

    For a decode server, whose command line has no flag of ours: whether its environment makes it
    wait for all prefill ranks.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    try:
        args: Any = prepare_server_args(list(argv))
    except ConfigError as error:
        return [Finding("command line", False, str(error))]
    except SystemExit:
        return [Finding("command line", False, "SGLang's parser refuses it, see above")]
    except (AssertionError, ValueError, RuntimeError) as error:
        return [Finding("command line", False, f"SGLang itself refuses it: {error}")]
    all_send = settings.all_ranks_send()
    if args.disaggregation_mode == "decode":
        told = (
            "set, as prefill servers with the flag need it; behind stock ones requests would wait"
            if all_send
            else "not set: behind prefill servers with the flag, decode would start when rank 0 "
            "alone has sent"
        )
        return [Finding(ALL_RANKS_SEND, all_send, told)]
    if getattr(args, ATTRIBUTE, False):
        return [Finding("command line", True, "accepted")]
    found = [Finding("command line", False, f"{FLAG} is not given")]
    if all_send and args.enable_nsa_prefill_context_parallel:
        told = "set without the flag: SGLang itself loses pages after a prefix hit then; unset it"
        found.append(Finding(ALL_RANKS_SEND, False, told))
    return found


def _entry_point() -> Finding:
    values = [
        point.value
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        if point.name == "cp_shared_kv"
    ]
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "cp_shared_kv" not in [name.strip() for name in allowed.split(",")]:
        return Finding("entry point", False, f"shut out by SGLANG_PLUGINS={allowed}")
    missing = "none; install cp-shared-kv into SGLang's environment"
    return Finding("entry point", bool(values), ", ".join(values) or missing)


def _tested() -> str:
    return ", ".join(versions.SUPPORTED)
