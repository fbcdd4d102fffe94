"""The server's process: `python -m cp_shared_kv.server.process RUN_FILE LIFE LISTENER_FD`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from functools import partial
from pathlib import Path

import msgspec
import zmq.asyncio

from cp_shared_kv._version import __version__
from cp_shared_kv.engine.api import EngineDescription
from cp_shared_kv.engine.api_key import with_api_key
from cp_shared_kv.engine.background import beside
from cp_shared_kv.engine.child import ALIVE_SECONDS, SupervisorLink, begin, run_child
from cp_shared_kv.engine.client import ClusterClient
from cp_shared_kv.engine.codecs import FROM_SUPERVISOR
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.off_host import OffHostDoor
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.server.app import create_app
from cp_shared_kv.server.chat_template import ChatTemplate
from cp_shared_kv.server.drain import Gate
from cp_shared_kv.server.exposure import warn_of_exposure
from cp_shared_kv.server.generation_defaults import GenerationDefaults
from cp_shared_kv.server.serve import serve
from cp_shared_kv.server.settings import ServerSettings
from cp_shared_kv.server.tokenizer import Tokenizer

logger = logging.getLogger("cp_shared_kv")


def describe(spec: RunSpec) -> EngineDescription:
    """What does not change during this run, as the server tells it to clients."""
    config, limits = spec.engine_config(), spec.limits
    return EngineDescription(
        model_name=config.model_name,
        version=__version__,
        context_length=limits.context_length,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        page_size=limits.page_size,
        cp_size=limits.cp_size,
        shard_policy="page_interleaved" if limits.shared else "replicated",
        kv_read=config.resolved_kv_read,
        physical_tokens_per_rank=limits.physical_tokens_per_rank,
        logical_tokens=limits.logical_tokens,
        decode_tokens=limits.decode_tokens,
        pool_bytes_per_rank=limits.pool_bytes_per_rank,
        scratch_limit_bytes=limits.scratch_limit_bytes,
        prefill_groups=config.prefill_groups,
        decode_workers=config.decode_workers,
        router_policy=config.router_policy,
        config=config.as_shown(),
    )


async def _serve(
    spec: RunSpec, life: Life, listener: socket.socket, supervisor: SupervisorLink
) -> None:
    description = describe(spec)
    config = spec.engine_config()
    directory = config.model_path
    tokenizer = Tokenizer.from_directory(directory)
    supervisor.report("started")
    keys, open_off_host = spec.control_keys(), None
    if config.control_host is not None and keys is not None:
        open_off_host = partial(OffHostDoor, host=config.control_host, port=0, keys=keys)
    client = ClusterClient(spec.endpoints.inbox(life), description, open_off_host=open_off_host)
    gate = Gate()
    app = create_app(
        client,
        tokenizer,
        description,
        defaults=GenerationDefaults.from_directory(directory),
        chat_template=ChatTemplate.from_directory(directory),
        settings=ServerSettings(api_key=config.api_key, enable_metrics=config.enable_metrics),
        gate=gate,
    )
    warn_of_exposure(listener, has_api_key=config.api_key is not None)
    door = client.off_host_door
    supervisor.report("reachable", address="" if door is None else door.address)
    news = asyncio.create_task(_pass_on_news(supervisor, client))
    try:
        await beside([news], client.start())
        serving = serve(
            app,
            listener,
            on_ready=lambda _address: supervisor.report("ready"),
            gate=gate,
            drain_seconds=config.shutdown_timeout,
        )
        await beside([news, *client.tasks], serving)
    finally:
        news.cancel()
        await client.close()


async def _pass_on_news(supervisor: SupervisorLink, client: ClusterClient) -> None:
    """What the supervisor says goes to the client; now and then it is told that we live."""
    link = zmq.asyncio.Socket.from_socket(supervisor.socket)
    while True:
        if await link.poll(timeout=int(ALIVE_SECONDS * 1000)):
            try:
                await client.on_news(FROM_SUPERVISOR.decode(await link.recv()))
            except ProtocolError as error:
                logger.error("message refused: %s", error)
        supervisor.report_alive()


def main(arguments: list[str]) -> int:
    """Entry point of the server process."""
    saved = RunSpec.load(Path(arguments[0]))
    life = Life.parse(arguments[1])
    begin(saved, life.unit)
    config = with_api_key(saved.engine_config(), os.environ)
    spec = msgspec.structs.replace(saved, config=config.as_plain())
    listener = socket.socket(fileno=int(arguments[2]))
    return run_child(
        spec, life.identity, lambda link: asyncio.run(_serve(spec, life, listener, link))
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
