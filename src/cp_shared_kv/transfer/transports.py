"""The transports by the name that --disaggregation-transfer-backend gives them."""

from __future__ import annotations

from typing import Literal

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.transfer.transport import KVTarget, KVTransport

TransferBackend = Literal["shared_memory", "mooncake"]


def make_transport(
    backend: TransferBackend, session_id: str, *, other_hosts: bool = False
) -> KVTransport:
    """The sending end, at a CP rank; `other_hosts` lets it write to other hosts too.

    StartupError if what `backend` needs is not installed, ConfigError if it ends at this host.
    """
    # Imported here: whoever only needs the names does not pay for torch.
    if backend == "shared_memory":
        from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport

        _check_one_host(other_hosts)
        return SharedMemoryTransport(session_id)
    from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport

    return MooncakeTransport(session_id, other_hosts=other_hosts)


def make_target(backend: TransferBackend, name: str, *, host: str | None = None) -> KVTarget:
    """The receiving end, at decode; `host` is its address for senders of other hosts.

    Errors as of `make_transport`. `name` is that of this life of the worker, with its epoch; the
    session id that senders connect to is the target's to choose.
    """
    if backend == "shared_memory":
        from cp_shared_kv.transfer.shared_memory import SharedMemoryTarget

        _check_one_host(host is not None)
        return SharedMemoryTarget(name)
    from cp_shared_kv.transfer.mooncake_target import MooncakeTarget

    return MooncakeTarget(name) if host is None else MooncakeTarget(name, host)


def _check_one_host(elsewhere: bool) -> None:
    if elsewhere:
        raise ConfigError(
            "--disaggregation-transfer-backend shared_memory does not leave its host",
            change="use mooncake",
        )
