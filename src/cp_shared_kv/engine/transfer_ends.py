"""The two ends of the transfer from prefill to decode, as a config and a device ask for them."""

from __future__ import annotations

import logging

import torch

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer, SharedMemoryBuffer
from cp_shared_kv.memory.cuda_ipc import CudaIpcBuffer
from cp_shared_kv.transfer.transport import KVTarget, KVTransport
from cp_shared_kv.transfer.transports import make_target, make_transport

logger = logging.getLogger("cp_shared_kv")


def rank_transport(config: EngineConfig, session_id: str, device: torch.device) -> KVTransport:
    """The sending end, at a CP rank. StartupError if what it needs is not installed."""
    return make_transport(
        config.disaggregation_transfer_backend,
        session_id,
        device,
        other_hosts=config.control_host is not None,
    )


def decode_target(
    config: EngineConfig, name: str, device: torch.device, host: str | None
) -> KVTarget:
    """The receiving end, at decode; `host` is its address where the senders are on another.

    StartupError if what it needs is not installed.
    """
    if config.transport == "mooncake":
        logger.warning(
            "Mooncake listens on all addresses of this host and asks nobody who they are: whoever "
            "reaches its ports can read and write this worker's KV pool. Only a firewall, or a "
            "network of the cluster's own, keeps strangers out (SECURITY.md)"
        )
    return make_target(config.disaggregation_transfer_backend, name, device, host=host)


def decode_buffer(config: EngineConfig, name: str, nbytes: int, device: torch.device) -> Buffer:
    """Memory for decode's pool that senders can reach. CapacityError when it does not fit."""
    if device.type == "cuda":
        return CudaIpcBuffer(name, nbytes, device)
    if config.transport == "mooncake":
        return PrivateBuffer(nbytes)
    # The name stays as long as this process: prefill groups come and go.
    return SharedMemoryBuffer.create(name, nbytes)
