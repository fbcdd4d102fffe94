"""The processes that hold pages: ranks, which send them, and decode workers, which receive them."""

from __future__ import annotations

from abc import abstractmethod

from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.testing.world.memory import NumberedPool
from cp_shared_kv.testing.world.network import Channel
from cp_shared_kv.testing.world.process import Process


class Holder(Process):
    """A process with a pool."""

    memory: NumberedPool


class Receiver(Holder):
    """A decode worker as ranks and controllers see it. `pool` says whose its pages are."""

    pool: LogicalPool

    @abstractmethod
    def connect(self, identity: bytes, channel: Channel) -> None:
        """A controller or a rank has a link to this door."""

    @abstractmethod
    def handle(self, sender: bytes, data: bytes) -> None:
        """One message of a controller or a rank, as `sender` on the link."""
