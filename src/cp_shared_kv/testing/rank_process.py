"""One rank of a `RankPool`: runs the functions it is told to, until its parent goes away.

Started as `python -m cp_shared_kv.testing.rank_process RANK SIZE STORE REPLY_FD`. Tasks come on
standard input and replies go to REPLY_FD, one JSON document a line; what a function prints goes
to the log that the parent keeps.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from cp_shared_kv.reads.group import TorchGroup


class Task(msgspec.Struct, frozen=True):
    """Run `function` on the first `size` ranks."""

    function: str
    size: int
    arguments: dict[str, Any]


class Reply(msgspec.Struct, frozen=True):
    """What the function returned, or the traceback of what it raised."""

    result: Any = None
    failure: str | None = None


@dataclass(frozen=True)
class RankContext:
    """What a function is told about the rank that it runs on."""

    rank: int
    size: int
    process_group: dist.ProcessGroup
    """The ranks of this call."""
    group: TorchGroup
    """The same as the CP group that the reads want."""


def main() -> None:
    rank, size, store, reply_fd = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # so that the parent can ask "where?"
    torch.set_num_threads(1)
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(tasks,), daemon=True).start()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    groups = [dist.new_group(list(range(members))) for members in range(1, size + 1)]
    with os.fdopen(reply_fd, "wb", buffering=0) as replies:
        replies.write(_line(Reply()))
        while True:
            task = tasks.get()
            process_group = groups[task.size - 1]
            assert isinstance(process_group, dist.ProcessGroup)  # else this rank is not in it
            context = RankContext(rank, task.size, process_group, TorchGroup(process_group))
            try:
                reply = _line(Reply(result=load(task.function)(context, **task.arguments)))
            except Exception:  # whatever it is, the parent reports it as this rank's failure
                reply = _line(Reply(failure=traceback.format_exc()))
            replies.write(reply)


def load(function: str) -> Callable[..., Any]:
    """The function of "package.module:name" or of "/path/to/file.py:name"."""
    place, _, name = function.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    if place not in sys.modules:
        spec = importlib.util.spec_from_file_location(place, place)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {place}")
        module = sys.modules[place] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(sys.modules[place], name)


def _receive(tasks: queue.SimpleQueue[Task]) -> None:
    for line in sys.stdin.buffer:
        tasks.put(msgspec.json.decode(line, type=Task))
    os._exit(0)  # the parent is gone; the main thread may be in a collective that never ends


def _line(reply: Reply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


if __name__ == "__main__":
    main()
