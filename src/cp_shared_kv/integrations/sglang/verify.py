"""Proof that every hook is in place and every function it wraps is the one that was tested.

SGLang logs what goes wrong in a plugin and goes on. Half of this one would store a share of the
pages and send or read as if it had all, so nothing starts unless all of it is there.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any

from cp_shared_kv.errors import StartupError
from cp_shared_kv.integrations.sglang import FLAG, versions
from cp_shared_kv.integrations.sglang.hooks import DOOR, GUARD, RELIED_ON, WORKER, Hook
from cp_shared_kv.integrations.sglang.source_fingerprint import (
    source_fingerprint,
    text_fingerprint,
)

REQUIRED = DOOR + GUARD + WORKER
# Made by @dataclass: there is no source to compare.
_GENERATED = ("sglang.srt.server_args.ServerArgs.__init__",)


def fingerprinted() -> list[str]:
    """Every target whose source is compared."""
    return [hook.target for hook in REQUIRED if hook.target not in _GENERATED] + list(RELIED_ON)


def why_unfit(version: str | None) -> list[str]:
    """Why the installed SGLang cannot carry the plugin, by its files alone; empty when it can."""
    release = versions.release(version)
    if release is None:
        found = version or "none"
        return [f"SGLang {found}: tested are {', '.join(versions.SUPPORTED)}; install one of these"]
    root = versions.package_root()
    changed: list[str] = []
    for target in fingerprinted():
        expected = release.FINGERPRINTS.get(target)
        try:
            found = source_fingerprint(root, target)
        except StartupError as error:
            changed.append(str(error))
            continue
        if found != expected:
            changed.append(
                f"{target} has been changed since SGLang {version} was published "
                f"({found}, tested with {expected}); reinstall that release"
            )
    return changed


def unapplied_door() -> list[str]:
    """The hooks of the flag itself that SGLang has not applied."""
    return _unapplied(DOOR)


def require_complete() -> None:
    """Before a pool is built: all of it is in place in this process, or StartupError says what not.

    Every required hook applied and ours; every wrapped function, below the wrappers, the tested
    one; nobody else replacing one of them.
    """
    wrong = why_unfit(versions.installed_version())
    wrong += [f"hook not applied: {target}" for target in _unapplied(REQUIRED)]
    if not wrong:
        release = versions.release(versions.installed_version())
        assert release is not None
        for hook in REQUIRED:
            wrong += _wrong_in_process(hook, release.FINGERPRINTS.get(hook.target))
    if wrong:
        raise StartupError(
            f"{FLAG}: this server would store a share of the KV and handle it as if it were all",
            value="".join(f"\n  - {line}" for line in wrong),
            change="start without the flag, or with an SGLang that `cpkv sglang doctor` accepts",
        )


def _unapplied(hooks: Iterable[Hook]) -> list[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry

    patched: set[str] = HookRegistry._patched  # pyright: ignore[reportPrivateUsage]
    return [hook.target for hook in hooks if hook.target not in patched]


def _wrong_in_process(hook: Hook, expected: str | None) -> list[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wrong: list[str] = []
    registered: dict[str, Any] = HookRegistry._hooks  # pyright: ignore[reportPrivateUsage]
    if any(kind == HookType.REPLACE for kind, *_ in registered.get(hook.target, ())):
        wrong.append(f"{hook.target} is replaced by another plugin")
    function = pkgutil.resolve_name(hook.target)
    if f"{__package__}.{hook.implementation.replace(':', '.')}" not in _wrapped_by(function):
        wrong.append(f"{hook.target} is not wrapped by {hook.implementation}")
    innermost = inspect.unwrap(function)
    if hook.target not in _GENERATED and text_fingerprint(_source(innermost)) != expected:
        wrong.append(f"{hook.target} was exchanged in this process by {innermost.__module__}")
    return wrong


def _wrapped_by(function: Any) -> set[str]:
    """The names of the functions that the wrappers around a function call."""
    names: set[str] = set()
    while hasattr(function, "__wrapped__"):
        for cell in function.__closure__ or ():
            content = cell.cell_contents
            names.add(f"{getattr(content, '__module__', '')}.{getattr(content, '__name__', '')}")
        function = function.__wrapped__
    return names


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
