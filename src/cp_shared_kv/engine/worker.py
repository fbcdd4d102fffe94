"""A CP rank: owns physical state, obeys batches. Never draws a page, never matches a prefix."""

from __future__ import annotations

import logging
import os
import time

import msgspec
import torch
import torch.distributed as dist
import zmq

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.child import report
from cp_shared_kv.engine.codecs import DECODE_TO_RANK, TO_RANK, encode
from cp_shared_kv.engine.links import rank_identity
from cp_shared_kv.engine.messages import (
    Configure,
    Configured,
    ConnectDecode,
    DecodeConnected,
    RankReady,
)
from cp_shared_kv.engine.model_spec import ModelDescription, describe_model
from cp_shared_kv.engine.rank_epoch import RankEpoch
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.group import CPGroup, TorchGroup
from cp_shared_kv.transfer.messages import AbortRoom, OpenRoom
from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport

RESEND_SECONDS = 1.0
"""A conclusion that decode has not acknowledged is said again after so long."""

logger = logging.getLogger("cp_shared_kv")


class RankWorker:
    """One rank of one group. `handle` takes the controller's messages in order.

    Every rank of the group is given the same `Configure` and `Batch` messages: both are
    collective.
    """

    def __init__(
        self,
        spec: RunSpec,
        model: ModelDescription,
        transformer: Transformer,
        group: CPGroup,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._spec = spec
        self._model = model
        self._transformer = transformer
        self._group = group
        self._rank = group.cp_rank
        self._context = context
        identity = rank_identity(self._rank)
        self.controller = context.socket(zmq.DEALER)
        self.controller.setsockopt(zmq.IDENTITY, identity)
        self.controller.linger = 0
        self.controller.connect(spec.endpoints.ranks)
        self.decode: zmq.Socket[bytes] | None = None
        self._transport = SharedMemoryTransport(f"{spec.run_id}-rank{self._rank}")
        self._epoch: RankEpoch | None = None

    def handle(self, message: msgspec.Struct) -> None:
        """Obey one message of the controller."""
        match message:
            case Configure():
                self._configure(message)
            case ConnectDecode():
                self._connect(message)
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

    def look_after_transfers(self) -> None:
        """Repeat what decode has not acknowledged, and check the books. Once in a while."""
        if self._epoch is not None:
            self._epoch.sender.resend()
            self._epoch.sender.check_invariants()

    def _configure(self, message: Configure) -> None:
        """Begin an epoch. Collective."""
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None
        self._epoch = RankEpoch(
            message,
            self._spec,
            self._model,
            self._transformer,
            self._group,
            self._transport,
            to_decode=self._to_decode,
            to_controller=self._to_controller,
        )
        self._to_controller(
            Configured(rank=self._rank, epoch=message.epoch, pool_bytes=self._epoch.pool_bytes)
        )

    def _connect(self, message: ConnectDecode) -> None:
        self._running().sender.connect(message.hello)
        if self.decode is None:
            self.decode = self._context.socket(zmq.DEALER)
            self.decode.setsockopt(zmq.IDENTITY, rank_identity(self._rank))
            self.decode.linger = 0
            self.decode.sndhwm = 0
            self.decode.connect(message.address)
        self._to_controller(DecodeConnected(rank=self._rank))

    def _running(self) -> RankEpoch:
        if self._epoch is None:
            raise ProtocolError("the rank has no pool yet", change="send Configure first")
        return self._epoch

    def _to_controller(self, message: msgspec.Struct) -> None:
        self.controller.send(encode(message))

    def _to_decode(self, message: msgspec.Struct) -> None:
        if self.decode is None:
            raise ProtocolError("no decode worker is connected to this rank")
        self.decode.send(encode(message))


def make_group(spec: RunSpec, rank: int) -> CPGroup:
    """Join the group's collectives: gloo over a file store in the run's private directory."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec.run_dir}/gloo",
        rank=rank,
        world_size=spec.limits.cp_size,
    )
    group = dist.group.WORLD
    assert group is not None
    return TorchGroup(group)


def run(spec: RunSpec, rank: int) -> None:
    """Body of a rank process."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = spec.engine_config()
    model = describe_model(config)
    transformer = Transformer.load(config.model_path, model.compute_dtype)
    worker = RankWorker(spec, model, transformer, make_group(spec, rank), zmq.Context.instance())
    worker.controller.send(encode(RankReady(rank=rank)))
    report(spec, f"rank-{rank}", ready=True)
    next_look_seconds = time.monotonic() + RESEND_SECONDS
    while True:
        sockets = [worker.controller] + ([worker.decode] if worker.decode is not None else [])
        wait_seconds = max(0.0, next_look_seconds - time.monotonic())
        ready, _, _ = zmq.select(sockets, [], [], timeout=wait_seconds)
        if time.monotonic() >= next_look_seconds:
            worker.look_after_transfers()
            next_look_seconds = time.monotonic() + RESEND_SECONDS
        if worker.decode is not None and worker.decode in ready:
            try:
                worker.on_decode(worker.decode.recv())
            except ProtocolError as error:
                logger.error("message of decode refused: %s", error)
        if worker.controller in ready:
            # A message of the controller that cannot be obeyed ends the rank: the other ranks
            # were given the same, and a batch that one of them skips would hang all.
            worker.handle(TO_RANK.decode(worker.controller.recv()))
