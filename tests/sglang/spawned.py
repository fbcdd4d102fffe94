"""What tests run in processes of their own, as SGLang spawns its schedulers."""

from __future__ import annotations

import multiprocessing
import os
import pickle

import cpu_stand_ins  # noqa: F401 (before SGLang)

from cp_shared_kv.errors import StartupError
from cp_shared_kv.integrations.sglang import ATTRIBUTE, hooks, verify
from cp_shared_kv.integrations.sglang.settings import RUN_WITH_FLAG


def flag_in_child(pickled_args: bytes, answers: multiprocessing.Queue[bool]) -> None:
    """The flag as it arrives in a child process, one that loads no plugins."""
    answers.put(getattr(pickle.loads(pickled_args), ATTRIBUTE))


def verified_in_a_scheduler_process(sabotage: str, answers: multiprocessing.Queue[str]) -> None:
    """Answers what the check says, after somebody has meddled with SGLang."""
    if sabotage == "flag lost":
        os.environ.pop(RUN_WITH_FLAG)
    if sabotage == "function exchanged":
        import sglang.srt.disaggregation.utils as utils

        def filter_kv_indices_for_cp_rank(_manager, kv_indices, index_slice):
            return kv_indices, index_slice

        utils.filter_kv_indices_for_cp_rank = filter_kv_indices_for_cp_rank
    if sabotage == "function gone":
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

        del MooncakeKVManager.send_aux
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if sabotage == "replaced by a stranger":
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        target = hooks.WORKER[-1].target
        HookRegistry.register(target, lambda *_args: None, HookType.REPLACE)
    try:
        verify.require_complete()
    except StartupError as error:
        answers.put(str(error))
    else:
        answers.put("complete")
