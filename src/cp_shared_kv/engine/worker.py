"""A CP rank: owns physical state, obeys batches. Never draws a page, never matches a prefix."""

from __future__ import annotations

import logging
import os
import time
from functools import partial

import msgspec
import torch
import torch.distributed as dist
import zmq

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.child import SupervisorLink
from cp_shared_kv.engine.codecs import DECODE_TO_RANK, TO_RANK, encode
from cp_shared_kv.engine.decode_links import DecodeLinks
from cp_shared_kv.engine.links import dealer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    Configure,
    Configured,
    ConnectDecode,
    DecodeConnected,
    DisconnectDecode,
    RankReady,
    RankState,
)
from cp_shared_kv.engine.model_spec import ModelDescription, describe_model, load_transformer
from cp_shared_kv.engine.placement import set_up_device
from cp_shared_kv.engine.rank_epoch import RankEpoch
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.same_ops import require_same_ops
from cp_shared_kv.engine.self_check import broken
from cp_shared_kv.engine.side_calls import SideCalls, ThreadEach
from cp_shared_kv.engine.transfer_ends import rank_transport
from cp_shared_kv.engine.transfer_peers import TransferPeers
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.group import CPGroup, GpuGroup, TorchGroup
from cp_shared_kv.transfer.messages import AbortRoom, OpenRoom

LEAVE_SECONDS = 1.0
"""How long an epoch that begins waits for the memory of the one before."""
RESEND_SECONDS = 1.0
"""A conclusion that decode has not acknowledged is said again after so long."""
MOST_ANSWERS = 1000
"""So many of one decode worker are heard before others have their turn."""

logger = logging.getLogger("cp_shared_kv")


class RankWorker:
    """One rank of one group. `handle` takes the controller's messages in order.

    Every rank of the group is given the same `Configure` and `Batch` messages: both are
    collective.
    """

    def __init__(
        self,
        spec: RunSpec,
        life: Life,
        model: ModelDescription,
        transformer: Transformer,
        group: CPGroup,
        calls: SideCalls | None = None,
    ) -> None:
        """`calls` makes those that may wait for decode workers; in threads, if it is None."""
        self._spec = spec
        self._life = life
        self._model = model
        self._transformer = transformer
        self._group = group
        self._rank = group.cp_rank
        self._identity = life.rank_identity(self._rank)
        self.controller = dealer(self._identity, spec.endpoints.inbox(life))
        calls = calls or ThreadEach()
        self.transfers_ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when `collect_transfers` has something to do."""
        self._peers = TransferPeers(
            rank_transport(
                spec.engine_config(), f"{spec.run_id}-{life}-rank{self._rank}", transformer.device
            ),
            calls,
            self._wake,
        )
        self.decodes = DecodeLinks(self._identity, spec.control_keys(), calls, self._wake)
        self._epoch: RankEpoch | None = None

    def handle(self, message: msgspec.Struct) -> None:
        """Obey one message of the controller."""
        match message:
            case Configure():
                self._configure(message)
            case ConnectDecode():
                self._connect(message)
            case DisconnectDecode():
                self._disconnect(message)
            case OpenRoom():
                self._running().open(message)
            case Batch():
                self._running().run(message)
            case AbortRoom():
                self._running().abort(message)
            case _:
                raise ProtocolError("not a message for a rank", value=type(message).__name__)

    def on_decode(self, data: bytes) -> None:
        """Decode's answer on the transfer link."""
        if self._epoch is not None:
            self._epoch.sender.on_decode(DECODE_TO_RANK.decode(data))

    def collect_transfers(self) -> None:
        """Writes have ended, or decode workers were reached, found again or let go."""
        os.eventfd_read(self.transfers_ended)
        self.decodes.collect()
        if self._epoch is not None:
            self._epoch.sender.collect()

    def look_after_transfers(self) -> None:
        """Repeat what decode has not acknowledged, and say how the books are. Once a second."""
        if self._epoch is None:
            return
        sender = self._epoch.sender
        sender.resend()
        for decode_epoch, failure in self.decodes.broken(sender.unreachable):
            self._report(decode_epoch, failure)
        problems = broken([sender.check_invariants])
        self._to_controller(
            RankState(
                rank=self._rank,
                open_rooms=sender.open_rooms,
                problem="; ".join(problems) or None,
            )
        )

    def _configure(self, message: Configure) -> None:
        """Begin an epoch. Collective."""
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None
            self._peers.settle(LEAVE_SECONDS)
        self._epoch = RankEpoch(
            message,
            self._spec,
            self._life,
            self._model,
            self._transformer,
            self._group,
            self._peers,
            to_decode=self.decodes.post,
            to_controller=self._to_controller,
        )
        self._to_controller(
            Configured(rank=self._rank, epoch=message.epoch, pool_bytes=self._epoch.pool_bytes)
        )

    def _connect(self, message: ConnectDecode) -> None:
        """A decode worker that cannot be reached is no fault of this rank: it is reported."""
        running = self._running()
        try:
            running.sender.connect(message.hello, partial(self._reached, running, message))
        except ProtocolError as error:
            self._report(message.hello.epoch, str(error))

    def _reached(self, running: RankEpoch, message: ConnectDecode, failure: str | None) -> None:
        if failure is None:
            linked = partial(self._linked, running, message.hello.epoch)
            self.decodes.open(message.hello.epoch, message.address, linked)
        else:
            self._report(message.hello.epoch, failure)

    def _linked(self, running: RankEpoch, decode_epoch: int, failure: str | None) -> None:
        if running is self._epoch:  # else a later epoch asks for it anew
            self._report(decode_epoch, failure)

    def _report(self, decode_epoch: int, failure: str | None) -> None:
        """Tell the controller that this rank can write to a decode worker, or why it cannot."""
        self._to_controller(
            DecodeConnected(rank=self._rank, decode_epoch=decode_epoch, failure=failure)
        )

    def _disconnect(self, message: DisconnectDecode) -> None:
        self._running().decode_dead(message)
        self.decodes.close(message.decode_epoch)

    def _running(self) -> RankEpoch:
        if self._epoch is None:
            raise ProtocolError("the rank has no pool yet", change="send Configure first")
        return self._epoch

    def _to_controller(self, message: msgspec.Struct) -> None:
        self.controller.send(encode(message))

    def _wake(self) -> None:
        os.eventfd_write(self.transfers_ended, 1)


def make_group(spec: RunSpec, life: Life, rank: int, device: torch.device) -> CPGroup:
    """Join the group's collectives: gloo over a file store in the run's private directory, and
    NCCL for what is on GPUs."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec.run_dir}/gloo-{life}",
        rank=rank,
        world_size=spec.limits.cp_size,
    )
    group = dist.group.WORLD
    assert group is not None
    if device.type == "cpu":
        return TorchGroup(group)
    ranks_share_gpus = torch.cuda.device_count() < spec.limits.cp_size
    if ranks_share_gpus:
        # NCCL refuses two ranks on a GPU, unless it takes them for two hosts.
        os.environ |= {"NCCL_HOSTID": f"{life}-rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        if rank == 0:
            logger.warning("the ranks share GPUs: right answers, and times that say nothing")
    gpus = dist.new_group(list(range(spec.limits.cp_size)), backend="nccl")
    assert isinstance(gpus, dist.ProcessGroup)
    return GpuGroup(group, gpus, ranks_share_gpus=ranks_share_gpus)


def run(spec: RunSpec, life: Life, rank: int, link: SupervisorLink) -> None:
    """Body of a rank process."""
    config = spec.engine_config()
    device = set_up_device(config, life, rank)
    model = describe_model(config)
    transformer, ops_name = load_transformer(config, model, device)
    group = make_group(spec, life, rank, device)
    require_same_ops(group, ops_name)
    worker = RankWorker(spec, life, model, transformer, group)
    worker.controller.send(encode(RankReady(rank=rank)))
    link.report("ready")
    next_look_seconds = time.monotonic() + RESEND_SECONDS
    while True:
        decodes = worker.decodes.all()
        wait_seconds = max(0.0, next_look_seconds - time.monotonic())
        waits = [worker.controller, worker.transfers_ended, *decodes]
        ready, _, _ = zmq.select(waits, [], [], timeout=wait_seconds)
        if worker.transfers_ended in ready:
            worker.collect_transfers()
        for decode in decodes:
            for _ in range(MOST_ANSWERS):
                if not decode.poll(0):
                    break
                try:
                    worker.on_decode(decode.recv())
                except ProtocolError as error:
                    logger.error("message of decode refused: %s", error)
        # Behind the answers: those that came during a long batch need not be asked for again.
        if time.monotonic() >= next_look_seconds:
            worker.look_after_transfers()
            next_look_seconds = time.monotonic() + RESEND_SECONDS
        if worker.controller in ready:
            # A message of the controller that cannot be obeyed ends the rank: the other ranks
            # were given the same, and a batch that one of them skips would hang all.
            worker.handle(TO_RANK.decode(worker.controller.recv()))
