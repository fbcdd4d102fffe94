"""The transports by the name that --disaggregation-transfer-backend gives them."""

from __future__ import annotations

from typing import Literal

from cp_shared_kv.transfer.transport import KVTarget, KVTransport

TransferBackend = Literal["shared_memory", "mooncake"]


def make_transport(backend: TransferBackend, session_id: str) -> KVTransport:
    """The sending end, at a CP rank. StartupError if what `backend` needs is not installed."""
    # Imported here: whoever only needs the names does not pay for torch.
    if backend == "shared_memory":
        from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(session_id)
    from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport

    return MooncakeTransport(session_id)


def make_target(backend: TransferBackend, name: str) -> KVTarget:
    """The receiving end, at decode. StartupError if what `backend` needs is not installed.

    `name` is that of this life of the worker, with its epoch; the session id that senders
    connect to is the target's to choose.
    """
    if backend == "shared_memory":
        from cp_shared_kv.transfer.shared_memory import SharedMemoryTarget

        return SharedMemoryTarget(name)
    from cp_shared_kv.transfer.mooncake_target import MooncakeTarget

    return MooncakeTarget(name)
