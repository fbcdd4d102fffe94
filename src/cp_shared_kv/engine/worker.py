"""A CP rank: owns physical state, obeys batches. Never draws a page, never matches a prefix."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import zmq

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.child import report
from cp_shared_kv.engine.codecs import DECODE_TO_RANK, TO_RANK, encode
from cp_shared_kv.engine.messages import (
    BatchDone,
    Configure,
    Configured,
    ConnectDecode,
    DecodeConnected,
    RankReady,
    RoomToken,
)
from cp_shared_kv.engine.model_runner import ModelRunner
from cp_shared_kv.engine.model_spec import ModelDescription, describe_model
from cp_shared_kv.engine.rank_pools import RankPools
from cp_shared_kv.engine.recording import LogitsLog
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.engine.transfer_sender import TransferSender
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.pages import LogicalPages, Positions
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.full_view import FullViewReader
from cp_shared_kv.reads.group import CPGroup, TorchGroup
from cp_shared_kv.reads.prefix_reader import LocalReader, PrefixReader
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.scratch import Scratch
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
        self._config = spec.engine_config()
        self._model = model
        self._transformer = transformer
        self._group = group
        self._rank = group.cp_rank
        self._context = context
        identity = f"rank-{self._rank}".encode()
        self.controller = context.socket(zmq.DEALER)
        self.controller.setsockopt(zmq.IDENTITY, identity)
        self.controller.linger = 0
        self.controller.connect(spec.endpoints.ranks)
        self.decode: zmq.Socket[bytes] | None = None
        self._configured: Configure | None = None
        self._pools: RankPools | None = None
        self._runner: ModelRunner | None = None
        self._sender: TransferSender | None = None
        self._sampling: dict[int, SamplingState] = {}
        """Of the open rooms whose first token has not been chosen."""
        self._transport = SharedMemoryTransport(f"{spec.run_id}-rank{self._rank}")
        self._scratch = Scratch(0)
        self._flip_before: int | None = None

    def handle(self, message: msgspec.Struct) -> None:
        """Obey one message of the controller."""
        match message:
            case Configure():
                self._configure(message)
            case ConnectDecode():
                self._connect(message)
            case OpenRoom():
                self._open(message)
            case Batch():
                self._run(message)
            case AbortRoom():
                self._running()[1].abort(message)
                self._sampling.pop(message.room, None)
            case _:
                raise ProtocolError("not a message for a rank", value=type(message).__name__)

    def on_decode(self, data: bytes) -> None:
        """Decode's answer on the transfer link."""
        if self._sender is not None:
            self._sender.on_decode(DECODE_TO_RANK.decode(data))

    def look_after_transfers(self) -> None:
        """Repeat what decode has not acknowledged, and check the books. Once in a while."""
        if self._sender is not None:
            self._sender.resend()
            self._sender.check_invariants()

    def _configure(self, message: Configure) -> None:
        """Make the pools of a new epoch. Collective."""
        if self._sender is not None:
            self._sender.close()
        if self._pools is not None:
            self._pools.close()
        self._runner = self._sender = self._pools = None
        self._sampling.clear()
        self._scratch = Scratch(message.scratch_limit_bytes)
        pool_spec = self._model.pool_spec
        if message.shared:
            names = [
                self._spec.region_name(f"rank{r}", message.epoch)
                for r in range(self._group.cp_size)
            ]
            pools = RankPools.make_shared(pool_spec, message.physical_pages, self._group, names)
        else:
            pools = RankPools.make_replicated(pool_spec, message.physical_pages)
        self._pools = pools
        log = None
        if message.record is not None:
            log = LogitsLog(Path(message.record) / f"rank{self._rank}")
        self._runner = ModelRunner(
            self._transformer,
            pools.pool,
            pools.layout,
            self._group,
            self._reader(message, pools),
            self._config.nsa_prefill_cp_mode,
            self._scratch,
            log,
        )
        self._sender = TransferSender(
            pools.layout,
            pools.pool,
            self._transport,
            rank=self._rank,
            epoch=message.epoch,
            sends_nothing=not message.shared and self._rank > 0,
            to_decode=self._to_decode,
            to_controller=self._to_controller,
        )
        self._configured = message
        self._flip_before = message.flip_byte_before_batch
        self._to_controller(
            Configured(
                rank=self._rank,
                epoch=message.epoch,
                pool_bytes=pool_spec.pool_bytes(message.physical_pages),
            )
        )

    def _reader(self, message: Configure, pools: RankPools) -> PrefixReader:
        if message.kv_read == "pull":
            return PullReader(self._group, pools.peers)
        if message.kv_read == "collective":
            return FullViewReader(self._group, pools.pool, self._scratch)
        return LocalReader()

    def _connect(self, message: ConnectDecode) -> None:
        self._running()[1].connect(message.hello)
        if self.decode is None:
            self.decode = self._context.socket(zmq.DEALER)
            self.decode.setsockopt(zmq.IDENTITY, f"rank-{self._rank}".encode())
            self.decode.linger = 0
            self.decode.sndhwm = 0
            self.decode.connect(message.address)
        self._to_controller(DecodeConnected(rank=self._rank))

    def _open(self, message: OpenRoom) -> None:
        """Take a room, and how its first token is to be chosen should its last row be here."""
        self._running()[1].open(message)
        self._sampling[message.room] = SamplingState(
            message.sampling,
            vocab_size=self._model.config.vocab_size,
            eos_token_ids=self._spec.eos_token_ids,
            prompt_token_ids=message.prompt_tokens(),
        )

    def _run(self, batch: Batch) -> None:
        """One forward pass, then the transfer of what it completed. Collective."""
        configured, sender, runner = self._running()
        if batch.epoch != configured.epoch:
            raise ProtocolError("batch of another epoch", value=batch.epoch)
        sharers = self._group.cp_size if configured.shared else 1
        batch.validate(
            page_size=self._config.page_size,
            logical_pages=configured.physical_pages * sharers,
            vocab_size=self._model.config.vocab_size,
        )
        if self._flip_before == batch.batch_id:
            self._flip_a_byte(batch)
        tokens = runner.execute(batch, self._sampling)
        self._to_controller(
            BatchDone(
                rank=self._rank,
                batch_id=batch.batch_id,
                tokens=[
                    RoomToken(room=room, token_id=token.token_id, logprobs=token.logprobs)
                    for room, token in tokens.items()
                ],
                scratch_bytes=self._scratch.bytes_in_use,
            )
        )
        for part in batch.requests:
            sender.send_chunk(part)
            if part.last:
                self._sampling.pop(part.room, None)

    def _flip_a_byte(self, batch: Batch) -> None:
        """Damage the first page that this rank owns of the batch's prefixes (a test's wish)."""
        assert self._pools is not None
        for part in batch.requests:
            prefix = part.pages()[: part.prefix_tokens // self._config.page_size]
            owned, _ = self._pools.layout.filter_owned_pages(
                LogicalPages(prefix), Positions(np.arange(len(prefix)))
            )
            if len(owned):
                page = int(owned[0])
                self._pools.pool.pages("latent", 0)[page, 3] ^= 0x40
                self._flip_before = None
                return

    def _running(self) -> tuple[Configure, TransferSender, ModelRunner]:
        if self._configured is None or self._sender is None or self._runner is None:
            raise ProtocolError("the rank has no pool yet", change="send Configure first")
        return self._configured, self._sender, self._runner

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
