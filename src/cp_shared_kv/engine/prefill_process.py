"""The controller's process: its links, the start of its group, its loop."""

from __future__ import annotations

import logging
import time

import msgspec
import zmq

from cp_shared_kv.engine.child import report
from cp_shared_kv.engine.codecs import FROM_SERVER, encode
from cp_shared_kv.engine.links import IDENTITY, GroupLinks
from cp_shared_kv.engine.messages import (
    BatchDone,
    Configure,
    RankReady,
    Registered,
    RoomConcluded,
)
from cp_shared_kv.engine.prefill import PrefillController
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.messages import AbortRoom, Declined, Released, Reserve

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


def run(spec: RunSpec, index: int) -> None:
    """Body of the controller process."""
    links = GroupLinks(spec)
    server = zmq.Context.instance().socket(zmq.DEALER)
    server.setsockopt(zmq.IDENTITY, IDENTITY)
    server.linger = 0
    server.sndhwm = server.rcvhwm = 0
    server.connect(spec.endpoints.server)

    def to_server(message: msgspec.Struct) -> None:
        server.send(encode(message))

    links.await_ranks(RankReady, "load their weights")
    configure = first_configuration(spec)
    decode = links.start_group(configure)
    controller = PrefillController(
        spec,
        epoch=configure.epoch,
        decode_epoch=decode.epoch,
        to_server=to_server,
        to_ranks=links.to_ranks,
        to_decode=links.to_decode,
    )
    log_capacity(spec)
    to_server(Registered(role="prefill"))
    report(spec, f"prefill-{index}", ready=True)
    while True:
        ready, _, _ = zmq.select([server, links.ranks, links.decode], [], [], timeout=IDLE_SECONDS)
        if not ready:
            controller.scheduler.check_invariants()
        for socket in ready:
            try:
                if socket is server:
                    controller.on_server(FROM_SERVER.decode(server.recv()))
                elif socket is links.ranks:
                    _from_rank(controller, links)
                else:
                    _from_decode(controller, links)
            except ProtocolError as error:
                # A bad message harms its sender's request, not the neighbours'.
                logger.error("message refused: %s", error)
        controller.step()


def _from_rank(controller: PrefillController, links: GroupLinks) -> None:
    message = links.from_rank()
    if isinstance(message, BatchDone | RoomConcluded):
        controller.on_rank(message)


def _from_decode(controller: PrefillController, links: GroupLinks) -> None:
    message = links.from_decode()
    if isinstance(message, Reserve | Declined | Released | AbortRoom):
        controller.on_decode(message)
