"""The decode worker's process: its pool in shared memory, its door, its loop."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import zmq

from cp_shared_kv.engine.child import ALIVE_SECONDS, SupervisorLink
from cp_shared_kv.engine.codecs import FROM_SERVER, encode
from cp_shared_kv.engine.decode import DecodeEngine
from cp_shared_kv.engine.decode_door import DecodeDoor
from cp_shared_kv.engine.decode_room import PrefillPeer
from cp_shared_kv.engine.joined_worker import CONTACT_SECONDS, JoinedWorker
from cp_shared_kv.engine.links import dealer, post
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    BeginReplay,
    Cancel,
    Check,
    Checked,
    Flush,
    Flushed,
    PageMapRequest,
    ProcessDown,
    ProcessUp,
    Registered,
    StatsRequest,
)
from cp_shared_kv.engine.model_runner import ModelRunner
from cp_shared_kv.engine.model_spec import ModelDescription, describe_model, load_transformer
from cp_shared_kv.engine.page_maps import told_page_map
from cp_shared_kv.engine.placement import set_up_device
from cp_shared_kv.engine.readers import KVReads
from cp_shared_kv.engine.recording import LogitsLog, MessageLog
from cp_shared_kv.engine.replay_decode import ReplayDecode
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.self_check import Bulletin
from cp_shared_kv.engine.transfer_ends import decode_buffer, decode_target
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_checksums import page_checksums
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.reads.prefix_reader import LocalReader
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Concluded,
    FirstToken,
    Offer,
    Quiesced,
    Sent,
    Withdrawn,
)

IDLE_SECONDS = 5.0

logger = logging.getLogger("cp_shared_kv")


@dataclass(frozen=True)
class _Ending:
    """A group that is gone, of which something may yet land."""

    peer: PrefillPeer
    reason: str
    since_seconds: float
    connections: frozenset[str]
    """On which it may come, where the kernel of this host cannot tell whose they are."""


class DecodeWorker:
    """Everything of one decode process: memory, model, sockets and the engine between them."""

    def __init__(self, spec: RunSpec, life: Life) -> None:
        config, limits = spec.engine_config(), spec.limits
        self._spec, self._life = spec, life
        self._epoch = time.time_ns()
        self._model: ModelDescription = describe_model(config)
        device = set_up_device(config, life, None)
        self._transformer, _ = load_transformer(config, self._model, device)
        capacity = limits.decode_capacity
        self._pages = capacity.physical_pages
        pool_spec = self._model.pool_spec
        name = spec.region_name(life, "pool", self._epoch)
        buffer = decode_buffer(config, name, pool_spec.pool_bytes(self._pages), device)
        host = config.control_host if spec.joined else None
        self._target = decode_target(config, f"{spec.run_id}-{life}-e{self._epoch}", device, host)
        self._target.expose(buffer)
        self._pool = KVPool(pool_spec, self._pages, buffer)
        self._layout = CpSharedKVLayout(limits.page_size, 1, 0, physical_pages=self._pages)
        record = config.record_batches
        self.door = zmq.Context.instance().socket(zmq.ROUTER)
        self.door.linger = 0
        self.door.sndhwm = self.door.rcvhwm = 0
        if record is not None:
            # The replay tool has the name of the controller whose place it takes, and may come
            # before zmq has noticed that one's end. In any other run a second process with a name
            # that is taken is not heard.
            self.door.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.door.bind(spec.endpoints.inbox(life))
        self.joined = JoinedWorker(spec, self.door) if spec.joined else None
        self.server: zmq.Socket[bytes] | None = None
        self._server_life: Life | None = None
        self._logical_pool = LogicalPool(capacity, prefix_caching=not config.disable_radix_cache)
        self.engine = DecodeEngine(
            self._logical_pool,
            self._runner(None if record is None else record / "decode"),
            epoch=self._epoch,
            cp_size=limits.cp_size,
            max_running=config.max_running_requests,
            quarantine_seconds=config.watchdog_timeout,
            vocab_size=spec.vocab_size,
            eos_token_ids=frozenset(spec.eos_token_ids),
            to_server=self._to_server,
            checksums=partial(page_checksums, self._pool) if config.verify_kv_transfer else None,
            log=None if record is None else MessageLog(record / "decode.messages"),
        )
        self._groups = DecodeDoor(
            spec.hello(
                role="decode",
                epoch=self._epoch,
                session_id=self._target.session_id,
                physical_pages=self._pages,
                regions=self._target.regions,
            ),
            send=self._to_group,
            is_idle=lambda: not self.engine.open_rooms,
        )
        self._ending: list[_Ending] = []
        self._bulletin = Bulletin(lambda now: self._to_server(Checked(ticket=0, problems=now)))
        self.replay: ReplayDecode | None = None

    def handle(self, sender: bytes, data: bytes) -> None:
        """One message of a controller, a rank or the replay tool, as `sender` on the link."""
        admitted = self._groups.admit(sender, data)
        if admitted is None:
            return  # a greeting
        peer, message = admitted
        if self.replay is not None:
            self.replay.handle(message)
            return
        match message:
            case Offer():
                self.engine.on_offer(peer, message)
            case Sent() | Concluded() | Quiesced():
                self.engine.on_transfer(peer, message)
            case FirstToken():
                self.engine.on_first_token(peer, message)
            case AbortRoom() | Withdrawn():
                self.engine.on_stop(peer, message)
            case BeginReplay():
                self._begin_replay(peer, message)
            case _:
                raise ProtocolError("only a replay sends this", value=type(message).__name__)

    def on_server(self, message: msgspec.Struct) -> None:
        """The server asks for figures, or cancels a room; requests go to the controllers."""
        match message:
            case StatsRequest():
                self._to_server(self.engine.stats(message.ticket))
            case PageMapRequest():
                self._to_server(told_page_map(message, self._logical_pool, self._epoch))
            case Flush():
                pages = self._logical_pool.clear()
                self._to_server(Flushed(ticket=message.ticket, pages=pages))
            case Check():
                problems = self.engine.problems(time.monotonic())
                self._to_server(Checked(ticket=message.ticket, problems=problems))
            case Cancel():
                self.engine.cancel(message.room, "the client went away")
            case _:
                raise ProtocolError("not a message for decode", value=type(message).__name__)

    def on_news(self, news: ProcessUp | ProcessDown) -> None:
        """The supervisor on the server and on prefill groups."""
        life = Life.parse(news.life)
        match news:
            case ProcessUp() if life.role == "server":
                self._server_up(life, news.address)
            case ProcessDown() if life == self._server_life:
                self.engine.server_lost(news.reason)
                self._close_server()
            case ProcessDown() if life.role == "prefill":
                peer = self._groups.lost(life)
                if peer is not None:
                    in_doubt = self.joined is not None and self.engine.awaits_pages_of(peer)
                    before = self._target.connections() if in_doubt else frozenset[str]()
                    self._ending.append(_Ending(peer, news.reason, time.monotonic(), before))
                    self.let_go()
            case _:
                pass

    def let_go(self) -> None:
        """End the rooms of groups that are gone, once what they had written has landed."""
        for ending in list(self._ending):
            if self._target.settled(ending.connections):
                self._ending.remove(ending)
                self.engine.peer_dead(ending.peer, ending.reason)

    def look_abroad(self) -> None:
        """CpkvError where links to another host leave something in doubt for too long."""
        if self.joined is not None:
            now = time.monotonic()
            self.joined.check_server(self.server, self._server_life, now)
            for ending in self._ending:
                self.joined.check_ending(ending.peer.life, ending.since_seconds, now)

    def check_books(self) -> None:
        """Tell the server what does not add up, if that has changed."""
        self._bulletin.post(self.engine.problems(time.monotonic()))

    def _server_up(self, life: Life, address: str) -> None:
        self._close_server()
        if self.joined is None:
            self.server = dealer(self._life.identity, address)
        else:
            self.server = dealer(
                self._life.identity, address, self.joined.keys, contact_seconds=CONTACT_SECONDS
            )
        self._server_life = life
        self._to_server(Registered())

    def _close_server(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def _begin_replay(self, peer: PrefillPeer, message: BeginReplay) -> None:
        if self._spec.config["record_batches"] is None:
            raise ProtocolError("a replay of a run that records nothing")
        if self.engine.open_rooms:
            raise ProtocolError("a replay while rooms are open", value=self.engine.open_rooms)
        self.replay = ReplayDecode(
            self._pool,
            self._runner(Path(message.record) / "decode"),
            epoch=self._epoch,
            prefill_epoch=message.prefill_epoch,
            cp_size=self._spec.limits.cp_size,
            to_controller=peer.to_controller,
            to_rank=peer.to_rank,
        )

    def _runner(self, record: Path | None) -> ModelRunner:
        return ModelRunner(
            self._transformer,
            self._pool,
            self._layout,
            SoloGroup(),
            KVReads(LocalReader(), Scratch(0, self._transformer.device)),
            "in-seq-split",
            None if record is None else LogitsLog(record),
        )

    def _to_group(self, identity: bytes, message: msgspec.Struct) -> None:
        self.door.send_multipart([identity, encode(message)])

    def _to_server(self, message: msgspec.Struct) -> None:
        if self.server is not None:  # else nobody has asked for anything yet
            post(self.server, message)


def run(spec: RunSpec, life: Life, supervisor: SupervisorLink) -> None:
    """Body of the decode process."""
    supervisor.report("started")
    worker = DecodeWorker(spec, life)
    supervisor.report("reachable", address="" if worker.joined is None else worker.joined.address)
    supervisor.report("ready")
    last_seconds = time.monotonic()
    while True:
        waits: list[zmq.Socket[bytes]] = [worker.door, supervisor.socket]
        if worker.server is not None:
            waits.append(worker.server)
        # While requests run, messages are taken between two steps without waiting.
        wait_seconds = 0.0 if worker.engine.has_work else ALIVE_SECONDS
        ready, _, _ = zmq.select(waits, [], [], timeout=wait_seconds)
        supervisor.report_alive()
        now = time.monotonic()
        if worker.door in ready or worker.engine.has_work or worker.replay is not None:
            last_seconds = now
        elif now - last_seconds > IDLE_SECONDS:
            last_seconds = now
            worker.check_books()
        if worker.door in ready:
            _drain(worker, worker.door)
        if worker.server is not None and worker.server in ready:
            _drain(worker, worker.server)
        if supervisor.socket in ready:
            worker.on_news(supervisor.receive())
        worker.let_go()
        worker.look_abroad()
        if worker.engine.has_work:
            worker.engine.step()


def _drain(worker: DecodeWorker, socket: zmq.Socket[bytes]) -> None:
    """Take all that has come, so that offers and conclusions never wait for a step each."""
    while socket.poll(0):
        frames = socket.recv_multipart()
        try:
            if socket is worker.door:
                worker.handle(frames[0], frames[-1])
            else:
                worker.on_server(FROM_SERVER.decode(frames[-1]))
        except ProtocolError as error:
            logger.error("message refused: %s", error)
