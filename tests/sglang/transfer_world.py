"""SGLang's own managers on loopback: a bootstrap server, N prefill ranks, one decode worker.

Real sockets, threads and Mooncake over TCP. Only what asks for a process group of a GPU is
answered by constants. Runs in a process of its own, which serves one case after another.
"""

from __future__ import annotations

import os
import socket
import time
import types
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import cpu_stand_ins  # noqa: F401 (before SGLang)
import numpy as np
import torch

PAGE, LAYERS, PHYSICAL_PAGES, DECODE_PAGES = 64, 2, 12, 40
KV_BYTES, STATE_BYTES, AUX_SLOTS = 1152 * PAGE, 8448, 8
LIMIT_SECONDS = 40.0


class Rank:
    """Pages of KV and of index K by layer, u8[pages + 1, bytes], and metadata slots."""

    def __init__(self, pages: int, seed: int | None) -> None:
        generator = torch.Generator().manual_seed(seed or 0)

        def filled(width: int) -> torch.Tensor:
            if seed is None:
                return torch.zeros(pages + 1, width, dtype=torch.uint8)
            return torch.randint(0, 256, (pages + 1, width), generator=generator, dtype=torch.uint8)

        self.kv = [filled(KV_BYTES) for _ in range(LAYERS)]
        self.state = [filled(STATE_BYTES) for _ in range(LAYERS)]
        self.aux = torch.full((AUX_SLOTS, 32), 7 if seed is not None else 0, dtype=torch.int32)

    def kv_args(self, rank: int, *, components: bool) -> Any:
        from sglang.srt.disaggregation.base.conn import KVArgs

        args = KVArgs()
        args.engine_rank = rank
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = _infos(self.kv)
        state = _infos(self.state)
        if components:
            from sglang.srt.disaggregation.base.conn import StateType

            args.state_types, state = [StateType.NSA], tuple([part] for part in state)
            args.state_dim_per_tensor = [[]]
        else:
            args.state_type, args.state_dim_per_tensor = "nsa", []
        args.state_data_ptrs, args.state_data_lens, args.state_item_lens = state
        args.aux_data_ptrs = [self.aux.data_ptr()]
        args.aux_data_lens, args.aux_item_lens = [self.aux.nbytes], [self.aux[0].nbytes]
        args.ib_device, args.gpu_id, args.page_size = None, 0, PAGE
        args.pp_rank = args.prefill_start_layer = args.system_dp_rank = 0
        args.kv_head_num = args.total_kv_head_num = 1
        return args


def _infos(layers: list[torch.Tensor]) -> tuple[list[int], list[int], list[int]]:
    return (
        [layer.data_ptr() for layer in layers],
        [layer.nbytes for layer in layers],
        [layer[0].nbytes for layer in layers],
    )


class World:
    """One prefill group of `cp_size` ranks and the decode worker that it sends to."""

    def __init__(self, cp_size: int) -> None:
        from sglang.srt.disaggregation.mooncake import conn
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        from cp_shared_kv.integrations.sglang import plugin, versions
        from cp_shared_kv.integrations.sglang.hooks import WORKER

        release = versions.release(versions.installed_version())
        assert release is not None
        self.components = release.STATE_IS_LIST_OF_COMPONENTS
        plugin._register(h for h in WORKER if h.implementation.startswith("sender:"))
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()
        port = _free_port()
        args = ServerArgs(model_path="dummy", host="127.0.0.1", disaggregation_bootstrap_port=port)
        args.page_size, args.kv_cache_dtype = PAGE, "bfloat16"
        args.load_balance_method = "follow_bootstrap_room"
        set_global_server_args_for_scheduler(args)
        self.address = f"127.0.0.1:{port}"
        self.bootstrap = conn.MooncakeKVBootstrapServer("127.0.0.1", port)
        time.sleep(1)
        self.cp_size, self.conn, self.room = cp_size, conn, 0
        self.ranks = [Rank(PHYSICAL_PAGES, seed=rank + 1) for rank in range(cp_size)]
        self.decode = Rank(DECODE_PAGES, seed=None)
        prefill = DisaggregationMode.PREFILL
        self.managers = [
            self._manager(prefill, args, rank, cp_size, self.ranks[rank]) for rank in range(cp_size)
        ]
        self.receiver = self._manager(DisaggregationMode.DECODE, args, 0, 1, self.decode)
        assert self.receiver.try_ensure_parallel_info(self.address)

    def _manager(self, mode: Any, args: Any, cp_rank: int, cp_size: int, rank: Rank) -> Any:
        from sglang.srt.disaggregation.common import conn as common
        from sglang.srt.distributed.device_communicators import mooncake_transfer_engine

        engine = mooncake_transfer_engine.MooncakeTransferEngine("127.0.0.1", gpu_id=0)
        solo = types.SimpleNamespace(
            is_last_rank=True, is_first_rank=True, rank_in_group=0, world_size=1
        )
        answers = {
            "get_attention_tp_size": 1,
            "get_attention_tp_rank": 0,
            "get_attention_cp_size": cp_size,
            "get_attention_cp_rank": cp_rank,
            "get_attention_dp_size": 1,
            "get_attention_dp_rank": 0,
            "get_pp_group": solo,
        }
        with ExitStack() as patches:
            for name, answer in answers.items():
                patches.enter_context(mock.patch.object(common, name, return_value=answer))
            patches.enter_context(
                mock.patch.object(self.conn, "get_mooncake_transfer_engine", return_value=engine)
            )
            kv_args = rank.kv_args(cp_rank, components=self.components)
            return self.conn.MooncakeKVManager(kv_args, mode, args, is_mla_backend=True)

    def send(self, case: dict[str, Any]) -> dict[str, Any]:
        """One room: what each side says in the end, and what is in decode's memory.

        case: logical pages; destinations of those that decode has not; chunks, in pages; prefix,
        the pages that decode has; trouble, what goes wrong.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        for layers in (self.decode.kv, self.decode.state):
            for layer in layers:
                layer.zero_()
        self.room += 1
        prefix, trouble = case.get("prefix", 0), case.get("trouble", "")
        logical = np.array(case["logical_pages"], np.int32)
        wanted = np.array(case["destinations"], np.int32)
        # Decode's own pages for the prefix, which its request lists as well.
        state_destinations = [DECODE_PAGES - i for i in range(prefix)] + wanted.tolist()
        senders = [
            self.conn.MooncakeKVSender(manager, self.address, self.room, [0], 0)
            for manager in self.managers
        ]
        receiver = self.conn.MooncakeKVReceiver(self.receiver, self.address, self.room)
        receiver.init(0)
        receiver.send_metadata(
            wanted[: case.get("reserved", len(wanted))],
            aux_index=2,
            state_indices=self._state(state_destinations),
        )
        _until(lambda: all(s.poll() == KVPoll.WaitingForInput for s in senders))
        with ExitStack() as patches:
            if trouble == "index K of rank 1":
                patches.enter_context(_failing_state(self.managers[1]))
            to_send, state = logical[prefix:], self._state(logical.tolist())
            for rank, sender in enumerate(senders):
                sender.init(len(to_send), aux_index=1)
                position = 0
                for count in case["chunks"]:
                    chunk = to_send[position : position + count]
                    position += count
                    last = position == len(to_send)
                    if trouble == "aborted" and rank == 0 and position > count:
                        sender.abort()
                        break
                    if sender.should_send_kv_chunk(len(chunk), last):
                        sender.send(chunk, state if last else None)
            ended = (KVPoll.Success, KVPoll.Failed)
            _until(
                lambda: receiver.poll() in ended and all(s.poll() in ended for s in senders),
                case.get("seconds", LIMIT_SECONDS),
            )
        return {
            "receiver": _word(receiver.poll()),
            "senders": [_word(sender.poll()) for sender in senders],
            "right": self._arrived(logical, prefix, wanted, state_destinations),
            "touched": self._touched(),
            "aux": int(self.decode.aux[2, 0]),
        }

    def _state(self, pages: list[int]) -> list[Any]:
        return [pages] if self.components else pages

    def _arrived(self, logical: Any, prefix: int, wanted: Any, state_wanted: list[int]) -> bool:
        for layer in range(LAYERS):
            for page, there in zip(logical[prefix:], wanted, strict=True):
                owner, physical = (page - 1) % self.cp_size, (page - 1) // self.cp_size + 1
                if not torch.equal(
                    self.decode.kv[layer][there], self.ranks[owner].kv[layer][physical]
                ):
                    return False
            for page, there in zip(logical, state_wanted, strict=True):
                owner, physical = (page - 1) % self.cp_size, (page - 1) // self.cp_size + 1
                mine = self.ranks[owner].state[layer][physical]
                if not torch.equal(self.decode.state[layer][there], mine):
                    return False
        return True

    def _touched(self) -> list[int]:
        """The decode pages of KV that are not as they were."""
        touched = torch.stack([layer.any(dim=1) for layer in self.decode.kv]).any(dim=0)
        return torch.nonzero(touched).flatten().tolist()


def _failing_state(manager: Any) -> Any:
    """Index K cannot be sent by this manager; KV pages can."""
    original = manager._send_kvcache_generic

    def fail_for_state(*args: Any, **kwargs: Any) -> int:
        lengths = kwargs.get("item_lens") or args[3]
        return -1 if lengths[0] == STATE_BYTES else original(*args, **kwargs)

    return mock.patch.object(manager, "_send_kvcache_generic", fail_for_state)


def _until(condition: Any, seconds: float = LIMIT_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return
        time.sleep(0.02)


def _word(poll: int) -> str:
    from sglang.srt.disaggregation.base.conn import KVPoll

    names = ("Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success")
    return {getattr(KVPoll, name): name for name in names}[poll]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(cp_size: int, cases: Connection) -> None:
    """Answers cases until the other end closes."""
    os.environ.update(
        MC_FORCE_TCP="1",
        SGLANG_HOST_IP="127.0.0.1",
        SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER="1",
        SGLANG_DISAGGREGATION_THREAD_POOL_SIZE="4",
        SGLANG_DISAGGREGATION_QUEUE_SIZE="2",
    )
    try:
        world = World(cp_size)
        cases.send("ready")
        while True:
            cases.send(world.send(cases.recv()))
    except EOFError:
        os._exit(0)
    except BaseException as error:  # the test shows it
        cases.send(error)
        os._exit(1)
