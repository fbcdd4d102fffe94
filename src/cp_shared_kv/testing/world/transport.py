"""A transport whose writes land when the virtual clock says so, break half-way, or stray."""

from __future__ import annotations

from concurrent.futures import Future

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import Buffer
from cp_shared_kv.testing.world.ends import World
from cp_shared_kv.testing.world.holders import Holder, Receiver
from cp_shared_kv.testing.world.weather import Fate
from cp_shared_kv.testing.world.writes import Write
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs

STALL_SECONDS = 2.0
"""A write to a peer that is stopped is given up after so long."""
LOOK_SECONDS = 0.2


class SimulatedTransport:
    """KVTransport of one simulated rank. `room` is whose write comes next: a write does not say."""

    def __init__(self, world: World, rank: Holder) -> None:
        self._world, self._rank = world, rank
        self._peers: dict[str, Receiver] = {}
        self._unreachable: set[str] = set()
        self.room = 0

    @property
    def peers(self) -> list[str]:
        """The sessions that it is connected to."""
        return sorted(self._peers)

    @property
    def session_id(self) -> str:
        """What peers know this end as."""
        return self._rank.name

    def register(self, buffer: Buffer) -> Region:
        """There is one local region: the rank's pool."""
        return Region("pool", buffer.nbytes)

    def unregister(self, region: Region) -> None:
        """Forget a region."""

    def connect(self, peer: PeerInfo) -> None:
        """`unreachable` if it has died meanwhile."""
        decode = self._world.decode_of(Life.parse(peer.session_id))
        if decode is None:
            raise self._error("no such session", "unreachable", peer.session_id)
        self._peers[peer.session_id] = decode

    def disconnect(self, peer: str) -> None:
        """Drop what has not landed; `in_use` now and then while something may."""
        decode = self._peers.get(peer)
        if decode is None:
            return
        writes = self._world.writes.between(self._rank, decode)
        if writes and not self._world.weather.calm and self._world.rng.random() < 0.3:
            raise self._error("a write has not ended", "in_use", peer, quiescent=False)
        del self._peers[peer]
        self._unreachable.discard(peer)
        for write in writes:
            self._world.writes.over(write)
            write.fail("disconnected", "closed", quiescent=True)

    def write(self, peer: str, runs: Runs) -> Future[int]:
        """Begin a write; its fate is drawn now."""
        decode = self._peers[peer]
        write = Write(self._rank, decode, self.room, runs)
        if peer in self._unreachable:
            write.fail("the peer has not been found again", "unreachable", quiescent=True)
            self._world.harm(write, "a write of it broke")
            return write.future
        self._world.writes.add(write)
        self._world.write_begins(write)
        fate = self._world.weather.fate()
        if self._world.weather.writes_take_time:
            self._world.clock.after(fate.seconds, lambda: self._end(write, fate, peer))
        else:
            self._end(write, fate, peer)
        return write.future

    def revive(self, peer: str) -> bool:
        """False while the peer does not answer, or a stray may land."""
        decode = self._peers[peer]
        strays = [w for w in self._world.writes.between(self._rank, decode) if w.future.done()]
        found = decode.alive and not decode.stopped and not strays
        if found:
            self._unreachable.discard(peer)
        return found

    def close(self) -> None:
        """Disconnect all; a simulated rank ends without it."""
        for peer in list(self._peers):
            self.disconnect(peer)

    def _end(self, write: Write, fate: Fate, peer: str, waited_seconds: float = 0.0) -> None:
        world = self._world
        if write not in world.writes or not self._rank.alive:
            return
        if write.decode.stopped and world.weather.writes_take_time:
            if waited_seconds < STALL_SECONDS:
                waited_seconds += LOOK_SECONDS
                again = waited_seconds
                world.clock.after(LOOK_SECONDS, lambda: self._end(write, fate, peer, again))
                return
            fate = Fate("strays", 0.0, 0.0, 1.0)
        world.trace.add(self._rank.name, f"write of room {write.room}", fate)
        write.land(fate.landed)
        world.seen["write in part"] += 0 < write.landed_runs < write.runs.count
        match fate.end:
            case "lands":
                world.writes.over(write)
                if fate.damaged:
                    write.damage(world.rng)
                    world.harm(write, "a page of it was damaged")
                write.succeed()
            case "breaks":
                world.writes.over(write)
                world.harm(write, "a write of it broke")
                write.fail("the wire broke", "broken", quiescent=True)
            case "strays":
                self._unreachable.add(peer)
                world.harm(write, "a write of it broke")
                write.fail("nothing has landed for a while", "stalled", quiescent=False)
                self._lands_late(write, fate)

    def _lands_late(self, write: Write, fate: Fate) -> None:
        def late() -> None:
            if write in self._world.writes and write.decode.stopped:
                self._lands_late(write, fate)
            elif write in self._world.writes:
                self._world.trace.add(self._rank.name, f"stray of room {write.room} ends")
                if fate.lands_late:
                    self._world.seen["stray landed"] += write.land()
                self._world.writes.over(write)

        self._world.clock.after(max(fate.stray_seconds, 0.001), late)

    def _error(self, what: str, kind: str, peer: str, *, quiescent: bool = True) -> TransferError:
        return TransferError(what, kind=kind, peer=peer, quiescent=quiescent)
