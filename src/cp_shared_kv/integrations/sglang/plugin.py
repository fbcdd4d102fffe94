"""What SGLang calls when it loads plugins, in each of its processes."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterable

from cp_shared_kv.integrations.sglang import flags, versions
from cp_shared_kv.integrations.sglang.hooks import DOOR, GUARD, WORKER, Hook
from cp_shared_kv.integrations.sglang.settings import run_with_flag


def activate() -> None:
    """Register the hooks that this process needs; SGLang applies them when all plugins are loaded.

    The flag exists everywhere, for a release that was not tested too, where it is refused with
    the reason. Other functions are wrapped only in scheduler processes of a server that was
    started with it: their modules load what a front end does not need.
    """
    flags.add_field()
    _register(DOOR)
    if versions.release(versions.installed_version()) is None:
        return
    if multiprocessing.parent_process() is not None:
        _register(GUARD)
        if run_with_flag():
            _register(WORKER)


def _register(hooks: Iterable[Hook]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        module, _, name = hook.implementation.partition(":")
        implementation = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        HookRegistry.register(hook.target, implementation, HookType(hook.kind))
