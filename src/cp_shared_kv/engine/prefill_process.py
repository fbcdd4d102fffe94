"""The controller's process: its links, the start of its group, its loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from cp_shared_kv.engine.batch_watchdog import BatchWatchdog
from cp_shared_kv.engine.child import ALIVE_SECONDS, SupervisorLink
from cp_shared_kv.engine.codecs import FROM_SERVER, encode
from cp_shared_kv.engine.links import DecodeLink, RanksLink, dealer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    BatchDone,
    Checked,
    Configure,
    DecodeConnected,
    DisconnectDecode,
    ProcessDown,
    ProcessUp,
    RankState,
    RoomConcluded,
)
from cp_shared_kv.engine.off_host import is_off_host
from cp_shared_kv.engine.out_of_reach import OutOfReach
from cp_shared_kv.engine.pairing import DecodePeer, Pairing
from cp_shared_kv.engine.prefill import PrefillController
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.self_check import Bulletin
from cp_shared_kv.errors import HandshakeError, ProtocolError
from cp_shared_kv.transfer.messages import AbortRoom, Declined, Hello, Released, Reserve

IDLE_SECONDS = 5.0
"""After so long without a message the books are checked."""

logger = logging.getLogger("cp_shared_kv")


def log_capacity(spec: RunSpec) -> None:
    """The startup lines: what was allocated, in physical and logical tokens."""
    limits, config = spec.limits, spec.engine_config()
    if limits.shared:
        logger.info(
            "CP shared KV enabled. physical_tokens_per_rank=%d, logical_tokens=%d, cp_size=%d, "
            "shard_policy=page_interleaved",
            limits.physical_tokens_per_rank,
            limits.logical_tokens,
            limits.cp_size,
        )
        logger.info(
            "CP shared KV scheduler capacity: logical_tokens=%d, physical_tokens_per_rank=%d, "
            "cp_size=%d",
            limits.logical_tokens,
            limits.physical_tokens_per_rank,
            limits.cp_size,
        )
    logger.info(
        "KV Cache is allocated. bytes_per_rank=%d, longest_prompt_tokens=%d, "
        "scratch_limit_bytes=%d, kv_read=%s, decode_tokens=%d, context_length=%d",
        limits.pool_bytes_per_rank,
        limits.longest_prompt_tokens,
        limits.scratch_limit_bytes,
        config.resolved_kv_read,
        limits.decode_tokens,
        limits.context_length,
    )
    logger.info(
        "KV page formats: %s, %s", spec.page_layout.latent_format, spec.page_layout.index_format
    )


def first_configuration(spec: RunSpec) -> Configure:
    """What the ranks of a run are told at its start."""
    config, limits = spec.engine_config(), spec.limits
    return Configure(
        # Unique among all lives that could meet, and ordered for whoever reads a log.
        epoch=time.time_ns(),
        shared=limits.shared,
        physical_pages=limits.capacity.physical_pages,
        kv_read=config.resolved_kv_read,
        scratch_limit_bytes=limits.scratch_limit_bytes,
        record=None if config.record_batches is None else str(config.record_batches),
    )


class PrefillProcess:
    """The controller between its links: supervisor, server, ranks and decode workers."""

    def __init__(self, spec: RunSpec, life: Life, supervisor: SupervisorLink) -> None:
        self._spec, self._life, self._supervisor = spec, life, supervisor
        self._ranks = RanksLink(spec, life)
        self._server: zmq.Socket[bytes] | None = None
        self._server_life: Life | None = None
        self._links: dict[Life, DecodeLink] = {}
        self._pairings: dict[Life, Pairing] = {}
        self._peers: dict[Life, DecodePeer] = {}
        self._keys = spec.control_keys()
        self._out_of_reach = OutOfReach(
            life, lambda decode, why: supervisor.report("gave_up", why, peer=str(decode))
        )
        self._ranks.wait_until_ready()
        configure = first_configuration(spec)
        self._ranks.configure(configure)
        self._epoch = configure.epoch
        self._controller = PrefillController(
            spec, epoch=configure.epoch, to_server=self._to_server, to_ranks=self._ranks.send
        )
        self._bulletin = Bulletin(lambda now: self._to_server(Checked(ticket=0, problems=now)))
        self._watchdog = BatchWatchdog(spec.engine_config().watchdog_timeout)

    def run(self) -> None:
        """Take messages and run batches until the process is stopped."""
        last_seconds = time.monotonic()
        while True:
            waits: list[zmq.Socket[bytes]] = [
                self._supervisor.socket,
                self._ranks.socket,
                *(link.socket for link in self._links.values()),
            ]
            if self._server is not None:
                waits.append(self._server)
            # Before the wait: whoever is judged by it has its messages read first.
            now = time.monotonic()
            ready, _, _ = zmq.select(waits, [], [], timeout=ALIVE_SECONDS)
            self._supervisor.report_alive()
            if ready and ready != [self._ranks.socket]:  # ranks speak every second
                last_seconds = now
            elif now - last_seconds > IDLE_SECONDS:
                last_seconds = now
                self._bulletin.post(self._controller.problems())
            if self._ranks.socket in ready:
                self._take(self._from_rank)
            for life, link in list(self._links.items()):
                if link.socket in ready:
                    self._take(partial(self._from_decode, life, link))
                self._out_of_reach.look(link, greeted=self._has_greeted(life), now_seconds=now)
            if self._server is not None and self._server in ready:
                self._take(partial(self._from_server, self._server))
            if self._supervisor.socket in ready:
                self._take(self._from_supervisor)
            self._controller.step()
            self._watchdog.look(self._controller.scheduler.in_flight, now)

    def _take(self, handle: Callable[[], None]) -> None:
        try:
            handle()
        except HandshakeError:
            raise  # this group serves no one it does not fit
        except ProtocolError as error:
            # A bad message harms its sender's request, not the neighbours'.
            logger.error("message refused: %s", error)

    def _from_supervisor(self) -> None:
        news = self._supervisor.receive()
        life = Life.parse(news.life)
        match news:
            case ProcessUp() if life.role == "decode":
                self._decode_up(life, news.address)
            case ProcessUp() if life.role == "server":
                self._server_up(life, news.address)
            case ProcessDown() if life.role == "decode":
                self._decode_down(life, news.reason)
            case ProcessDown() if life == self._server_life:
                self._controller.server_lost(news.reason)
            case _:
                pass

    def _server_up(self, life: Life, address: str) -> None:
        if self._server is not None:
            self._server.close()
        self._server = dealer(self._life.identity, address)
        self._server_life = life
        self._controller.introduce()

    def _decode_up(self, life: Life, address: str) -> None:
        if life in self._links:
            return
        link = DecodeLink(self._life, life, address, self._keys)
        self._links[life] = link
        self._pairings[life] = Pairing(
            self._spec.hello(
                role="prefill",
                epoch=self._epoch,
                session_id=f"{self._spec.run_id}-{self._life}",
                physical_pages=self._spec.limits.capacity.physical_pages,
            ),
            life,
            address,
            cp_size=self._spec.limits.cp_size,
            send=link.send,
            to_ranks=self._ranks.send,
        )

    def _decode_down(self, life: Life, reason: str) -> None:
        self._out_of_reach.over(life)
        pairing = self._pairings.pop(life, None)
        link = self._links.pop(life, None)
        if link is not None:
            link.close()
        if self._peers.pop(life, None) is not None:
            self._controller.decode_lost(life, reason)
        elif pairing is not None and pairing.epoch is not None:
            # It died while the ranks were mapping its pool: they are to forget it as well.
            self._ranks.send(DisconnectDecode(decode_epoch=pairing.epoch, reason=reason))

    def _from_rank(self) -> None:
        message = self._ranks.receive()
        match message:
            case BatchDone() | RoomConcluded() | RankState():
                self._controller.on_rank(message)
            case DecodeConnected():
                self._mapped(message)
            case _:
                pass

    def _mapped(self, message: DecodeConnected) -> None:
        for life, pairing in list(self._pairings.items()):
            if pairing.epoch != message.decode_epoch:
                continue
            peer = pairing.mapped(message)
            if pairing.failure is not None:
                # It stays, so that those ranks that did map it forget it when it is gone.
                self._out_of_reach.give_up(
                    self._links[life], f"it cannot be written to: {pairing.failure}"
                )
            if peer is not None:
                del self._pairings[life]
                self._peers[life] = peer
                self._controller.paired(peer)
                logger.info("can send to %s at %s", life, self._links[life].address)
        for life, peer in self._peers.items():
            if peer.epoch == message.decode_epoch and message.failure is not None:
                why = f"rank {message.rank}: {message.failure}"
                self._out_of_reach.give_up(self._links[life], why)

    def _has_greeted(self, life: Life) -> bool:
        pairing = self._pairings.get(life)
        return pairing is None or pairing.epoch is not None

    def _from_decode(self, life: Life, link: DecodeLink) -> None:
        pairing = self._pairings.get(life)
        if pairing is not None and pairing.epoch is None:
            try:
                pairing.greeted(link.greeting(pairing.mine))
            except HandshakeError as error:
                if not is_off_host(link.address):
                    raise
                self._out_of_reach.give_up(link, str(error))
            return
        message = link.receive()
        if isinstance(message, Hello):
            raise ProtocolError("a second greeting", value=str(life))
        if isinstance(message, Reserve | Declined | Released | AbortRoom):
            peer = self._peers.get(life)
            if peer is None:
                raise ProtocolError("a message before the pair stands", value=str(life))
            self._controller.on_decode(peer, message)

    def _from_server(self, server: zmq.Socket[bytes]) -> None:
        self._controller.on_server(FROM_SERVER.decode(server.recv()))

    def _to_server(self, message: msgspec.Struct) -> None:
        if self._server is not None:  # else nobody has asked for anything yet
            self._server.send(encode(message))


def run(spec: RunSpec, life: Life, supervisor: SupervisorLink) -> None:
    """Body of the controller process."""
    supervisor.report("started")
    process = PrefillProcess(spec, life, supervisor)
    log_capacity(spec)
    supervisor.report("ready")
    process.run()
