"""The transports by the name that --disaggregation-transfer-backend gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.transfer.transport import KVTarget, KVTransport

if TYPE_CHECKING:
    import torch

TransferBackend = Literal["shared_memory", "mooncake"]


def make_transport(
    backend: TransferBackend,
    session_id: str,
    device: torch.device | None = None,
    *,
    other_hosts: bool = False,
) -> KVTransport:
    """The sending end, at a CP rank; `other_hosts` lets it write to other hosts too.

    It reads from memory of `device`, if that is a GPU. StartupError if what `backend` needs is not
    installed, ConfigError if it ends at this host.
    """
    # Imported here: whoever only needs the names does not pay for torch.
    gpu = device if device is not None and device.type == "cuda" else None
    if backend == "mooncake":
        from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport

        return MooncakeTransport(session_id, gpu, other_hosts=other_hosts)
    _check_one_host(other_hosts)
    if gpu is not None:
        from cp_shared_kv.transfer.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport(session_id, gpu)
    from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport(session_id)


def make_target(
    backend: TransferBackend,
    name: str,
    device: torch.device | None = None,
    *,
    host: str | None = None,
) -> KVTarget:
    """The receiving end, at decode; `host` is its address for senders of other hosts.

    Its memory is that of `device`, if that is a GPU. Errors as of `make_transport`. `name` is that
    of this life of the worker, with its epoch; the session id that senders connect to is the
    target's to choose.
    """
    gpu = device if device is not None and device.type == "cuda" else None
    if backend == "mooncake":
        from cp_shared_kv.transfer.mooncake_session import LOOPBACK
        from cp_shared_kv.transfer.mooncake_target import MooncakeTarget

        return MooncakeTarget(name, host or LOOPBACK, gpu)
    _check_one_host(host is not None)
    if gpu is not None:
        from cp_shared_kv.transfer.cuda_ipc import CudaIpcTarget

        return CudaIpcTarget(name)
    from cp_shared_kv.transfer.shared_memory import SharedMemoryTarget

    return SharedMemoryTarget(name)


def _check_one_host(elsewhere: bool) -> None:
    if elsewhere:
        raise ConfigError(
            "--disaggregation-transfer-backend shared_memory does not leave its host",
            change="use mooncake",
        )
