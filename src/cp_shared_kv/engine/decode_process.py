"""The decode worker's process: its pool in shared memory, its door, its loop."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec
import torch
import zmq

from cp_shared_kv.engine.child import report
from cp_shared_kv.engine.codecs import FROM_SERVER, TO_DECODE, ToDecode, encode
from cp_shared_kv.engine.decode import DecodeEngine
from cp_shared_kv.engine.links import IDENTITY as CONTROLLER
from cp_shared_kv.engine.links import rank_identity
from cp_shared_kv.engine.messages import BeginReplay, RegionMapped, Registered, StatsRequest
from cp_shared_kv.engine.model_runner import ModelRunner
from cp_shared_kv.engine.model_spec import ModelDescription, describe_model
from cp_shared_kv.engine.recording import LogitsLog, MessageLog
from cp_shared_kv.engine.replay_decode import ReplayDecode
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.errors import HandshakeError, ProtocolError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.memory.buffers import SharedMemoryBuffer
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.reads.prefix_reader import LocalReader
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Concluded,
    FirstToken,
    Hello,
    Offer,
    Quiesced,
    Sent,
    Withdrawn,
)
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.rendezvous import check_hello

IDENTITY = b"decode-0"
IDLE_SECONDS = 5.0

logger = logging.getLogger("cp_shared_kv")


class DecodeWorker:
    """Everything of one decode process: memory, model, sockets and the engine between them."""

    def __init__(self, spec: RunSpec) -> None:
        config, limits = spec.engine_config(), spec.limits
        self._spec = spec
        self._epoch = time.time_ns()
        self._model: ModelDescription = describe_model(config)
        self._transformer = Transformer.load(config.model_path, self._model.compute_dtype)
        capacity = limits.decode_capacity
        self._pages = capacity.physical_pages
        pool_spec = self._model.pool_spec
        self._region = Region(
            spec.region_name("decode0", self._epoch), pool_spec.pool_bytes(self._pages)
        )
        self._buffer = SharedMemoryBuffer.create(self._region.name, self._region.nbytes)
        self._pool = KVPool(pool_spec, self._pages, self._buffer)
        self._layout = CpSharedKVLayout(limits.page_size, 1, 0, physical_pages=self._pages)
        record = config.record_batches
        context = zmq.Context.instance()
        self.door = context.socket(zmq.ROUTER)
        self.server = context.socket(zmq.DEALER)
        self.server.setsockopt(zmq.IDENTITY, IDENTITY)
        for socket in (self.door, self.server):
            socket.linger = 0
            socket.sndhwm = socket.rcvhwm = 0
        self.door.bind(spec.endpoints.decode)
        self.server.connect(spec.endpoints.server)
        self.engine = DecodeEngine(
            LogicalPool(capacity, prefix_caching=not config.disable_radix_cache),
            self._runner(None if record is None else record / "decode"),
            epoch=self._epoch,
            cp_size=limits.cp_size,
            max_running=config.max_running_requests,
            vocab_size=spec.vocab_size,
            eos_token_ids=frozenset(spec.eos_token_ids),
            to_controller=self._to_controller,
            to_rank=self._to_rank,
            to_server=self._to_server,
            log=None if record is None else MessageLog(record / "decode.messages"),
        )
        self.replay: ReplayDecode | None = None

    def handle(self, sender: bytes, message: ToDecode) -> None:
        """One message of the controller, a rank or the replay tool, as `sender` on the link."""
        expected = CONTROLLER
        if isinstance(message, Sent | Concluded | Quiesced):
            expected = rank_identity(message.rank)
        if sender != expected:
            raise ProtocolError(
                f"{type(message).__name__} comes from another than its sender",
                value=repr(sender[:40]),
                allowed=repr(expected),
            )
        if self.replay is not None and not isinstance(message, Hello | RegionMapped):
            self.replay.handle(message)
            return
        match message:
            case Hello():
                self._greet(message)
            case RegionMapped():
                self._buffer.unlink()
            case Offer():
                self.engine.on_offer(message)
            case Sent() | Concluded() | Quiesced():
                self.engine.on_transfer(message)
            case FirstToken():
                self.engine.on_first_token(message)
            case AbortRoom() | Withdrawn():
                self.engine.on_stop(message)
            case BeginReplay():
                self._begin_replay(message)
            case _:
                raise ProtocolError("only a replay sends this", value=type(message).__name__)

    def on_server(self, message: msgspec.Struct) -> None:
        """The server asks for figures; requests go to the controller."""
        if not isinstance(message, StatsRequest):
            raise ProtocolError("not a message for decode", value=type(message).__name__)
        self._to_server(self.engine.stats(message.ticket))

    def register(self) -> None:
        """Tell the server that decode can be asked."""
        self._to_server(Registered(role="decode"))

    def _greet(self, theirs: Hello) -> None:
        mine = self._spec.hello(
            role="decode",
            epoch=self._epoch,
            session_id=f"{self._spec.run_id}-decode0-e{self._epoch}",
            physical_pages=self._pages,
            regions=(self._region,),
        )
        if self.engine.open_rooms:
            raise ProtocolError("a greeting while rooms are open", value=self.engine.open_rooms)
        self._to_controller(mine)  # before the check: both sides refuse, with the same reason
        check_hello(mine, theirs)
        self.engine.prefill_epoch = theirs.epoch

    def _begin_replay(self, message: BeginReplay) -> None:
        if self.engine.open_rooms:
            raise ProtocolError("a replay while rooms are open", value=self.engine.open_rooms)
        self.replay = ReplayDecode(
            self._pool,
            self._runner(Path(message.record) / "decode"),
            epoch=self._epoch,
            prefill_epoch=message.prefill_epoch,
            cp_size=self._spec.limits.cp_size,
            to_controller=self._to_controller,
            to_rank=self._to_rank,
        )

    def _runner(self, record: Path | None) -> ModelRunner:
        return ModelRunner(
            self._transformer,
            self._pool,
            self._layout,
            SoloGroup(),
            LocalReader(),
            "in-seq-split",
            Scratch(0),
            None if record is None else LogitsLog(record),
        )

    def _to_controller(self, message: msgspec.Struct) -> None:
        self.door.send_multipart([CONTROLLER, encode(message)])

    def _to_rank(self, rank: int, message: msgspec.Struct) -> None:
        self.door.send_multipart([rank_identity(rank), encode(message)])

    def _to_server(self, message: msgspec.Struct) -> None:
        self.server.send(encode(message))


def run(spec: RunSpec, index: int) -> None:
    """Body of the decode process."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    worker = DecodeWorker(spec)
    worker.register()
    report(spec, f"decode-{index}", ready=True)
    while True:
        # While requests run, messages are taken between two steps without waiting.
        wait_seconds = 0.0 if worker.engine.has_work else IDLE_SECONDS
        ready, _, _ = zmq.select([worker.door, worker.server], [], [], timeout=wait_seconds)
        if not ready and not worker.engine.has_work and worker.replay is None:
            worker.engine.check_invariants()
        for socket in ready:
            _drain(worker, socket)
        if worker.engine.has_work:
            worker.engine.step()


def _drain(worker: DecodeWorker, socket: zmq.Socket[bytes]) -> None:
    """Take all that has come, so that offers and conclusions never wait for a step each."""
    while socket.poll(0):
        frames = socket.recv_multipart()
        try:
            if socket is worker.door:
                worker.handle(frames[0], TO_DECODE.decode(frames[-1]))
            else:
                worker.on_server(FROM_SERVER.decode(frames[-1]))
        except HandshakeError:
            raise  # this worker serves no one it does not fit
        except ProtocolError as error:
            logger.error("message refused: %s", error)
