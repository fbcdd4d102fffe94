"""The server's process: `python -m cp_shared_kv.server.process RUN_FILE LISTENER_FD`."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from cp_shared_kv._version import __version__
from cp_shared_kv.engine.api import EngineDescription
from cp_shared_kv.engine.child import die_with_supervisor, report, run_child, set_up_logging
from cp_shared_kv.engine.client import ClusterClient
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.server.app import create_app
from cp_shared_kv.server.chat_template import ChatTemplate
from cp_shared_kv.server.drain import Gate
from cp_shared_kv.server.generation_defaults import GenerationDefaults
from cp_shared_kv.server.serve import serve
from cp_shared_kv.server.settings import ServerSettings
from cp_shared_kv.server.tokenizer import Tokenizer

NAME = "server-0"


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
        config=config.as_shown(),
    )


async def _serve(spec: RunSpec, listener: socket.socket) -> None:
    description = describe(spec)
    config = spec.engine_config()
    directory = config.model_path
    tokenizer = Tokenizer.from_directory(directory)
    client = ClusterClient(spec.endpoints.server, description)
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
    await client.start()
    try:
        await serve(
            app,
            listener,
            on_ready=lambda _address: report(spec, NAME, ready=True),
            gate=gate,
            drain_seconds=config.shutdown_timeout,
        )
    finally:
        await client.close()


def main(arguments: list[str]) -> int:
    """Entry point of the server process."""
    spec = RunSpec.load(Path(arguments[0]))
    die_with_supervisor(spec)
    set_up_logging(NAME, spec.config["log_level"])
    listener = socket.socket(fileno=int(arguments[1]))
    return run_child(NAME, spec, lambda: asyncio.run(_serve(spec, listener)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
