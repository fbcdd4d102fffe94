"""Run a recording again on the same ranks, with every page on every rank, and compare the logits.

The recorded batch messages go out once more, in their order, to a replicated group whose ranks
hold N * P pages each. Its pages go to the same decode worker by the same transfer, and decode
runs its recorded steps. If sharing changed one bit of one page, some logit differs.

For recordings in which every request ran to its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.cluster import Cluster, Progress
from cp_shared_kv.engine.codecs import RECORDED, Recorded
from cp_shared_kv.engine.links import DecodeLink, RanksLink
from cp_shared_kv.engine.messages import (
    BatchDone,
    BeginReplay,
    Configure,
    DecodeConnected,
    ReplayReady,
    RoomCovered,
    StepDone,
)
from cp_shared_kv.engine.pairing import DecodePeer, Pairing
from cp_shared_kv.engine.recording import Difference, compare_logits, read_messages
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.errors import CpkvError, StartupError
from cp_shared_kv.transfer.messages import FirstToken, Hello, OpenRoom, Reserve


@dataclass(frozen=True)
class Comparison:
    """How two runs of the same messages compare: equal logit rows, and the first difference."""

    prompt_rows: int
    decode_rows: int
    difference: Difference | None

    @property
    def rows(self) -> int:
        """Rows compared, of prompts and of decode steps."""
        return self.prompt_rows + self.decode_rows


def replay_replicated(
    cluster: Cluster,
    recording: Path,
    record_to: Path,
    *,
    on_progress: Progress,
    flip_byte_before_batch: int | None = None,
) -> None:
    """Replay `recording` on the cluster's own ranks with replicated pools, into `record_to`.

    The cluster's controller is stopped: this process takes its place. `flip_byte_before_batch`
    damages one byte of one page before that batch, to show that the comparison notices.
    """
    spec, limits = cluster.spec, cluster.limits
    group, worker = cluster.life("prefill-0"), cluster.life("decode-0")
    cluster.take_over("prefill-0")
    prefill = [_decode(data) for data in read_messages(recording / "prefill.messages")]
    decode = [_decode(data) for data in read_messages(recording / "decode.messages")]
    ranks = RanksLink(spec, group)
    decode_link = DecodeLink(group, worker, spec.endpoints.inbox(worker))
    try:
        configure = Configure(
            epoch=time.time_ns(),
            shared=False,
            physical_pages=limits.capacity.logical_pages,
            kv_read="local",
            scratch_limit_bytes=limits.scratch_limit_bytes,
            record=str(record_to),
            flip_byte_before_batch=flip_byte_before_batch,
        )
        ranks.configure(configure)
        peer = _pair(spec, configure, ranks, decode_link)
        peer.send(BeginReplay(prefill_epoch=configure.epoch, record=str(record_to)))
        decode_link.wait_for(ReplayReady, "begin the replay")
        _Replay(ranks, decode_link, configure.epoch, peer.epoch, prefill, decode, on_progress).run()
    finally:
        ranks.close()
        decode_link.close()


def _pair(
    spec: RunSpec, configure: Configure, ranks: RanksLink, decode_link: DecodeLink
) -> DecodePeer:
    """The handshake with decode, step by step. StartupError if an end does not answer."""
    pairing = Pairing(
        spec.hello(
            role="prefill",
            epoch=configure.epoch,
            session_id=f"{spec.run_id}-replay",
            physical_pages=configure.physical_pages,
        ),
        decode_link.decode,
        decode_link.address,
        cp_size=spec.limits.cp_size,
        send=decode_link.send,
        to_ranks=ranks.send,
    )
    theirs = decode_link.wait_for(Hello, "answer the handshake")
    assert isinstance(theirs, Hello)
    pairing.greeted(theirs)
    peer: DecodePeer | None = None
    for told in ranks.wait_for(DecodeConnected, "map the decode worker's pool"):
        assert isinstance(told, DecodeConnected)
        peer = pairing.mapped(told)
    if peer is None:
        raise StartupError(f"the decode worker cannot be written to: {pairing.failure}")
    return peer


class _Replay:
    """Walks decode's recorded timeline; prefill runs as far as each room's cover needs."""

    def __init__(
        self,
        ranks: RanksLink,
        decode_link: DecodeLink,
        epoch: int,
        decode_epoch: int,
        prefill: list[Recorded],
        decode: list[Recorded],
        on_progress: Progress,
    ) -> None:
        self._ranks, self._decode_link = ranks, decode_link
        self._epoch, self._decode_epoch = epoch, decode_epoch
        self._prefill: Iterator[Recorded] = iter(prefill)
        self._decode = decode
        self._on_progress = on_progress
        self._all = sum(isinstance(m, Batch) for m in [*prefill, *decode])
        self._done = 0
        self._covered: set[int] = set()

    def run(self) -> None:
        for message in self._decode:
            match message:
                case Reserve():
                    self._decode_link.send(message)
                case FirstToken():
                    while message.room not in self._covered:
                        self._prefill_until_covered(message.room)
                case Batch():
                    self._decode_link.send(message)
                    self._decode_link.wait_for(StepDone, "run a recorded step")
                    self._count("decode steps")
                case OpenRoom():
                    raise CpkvError("a prefill message in decode's recording")

    def _prefill_until_covered(self, room: int) -> None:
        """Run recorded prefill messages up to the room's last chunk, then wait for its pages."""
        for message in self._prefill:
            if isinstance(message, OpenRoom):
                self._ranks.send(
                    msgspec.structs.replace(
                        message, epoch=self._epoch, decode_epoch=self._decode_epoch
                    )
                )
            elif isinstance(message, Batch):
                self._ranks.send(msgspec.structs.replace(message, epoch=self._epoch))
                self._ranks.wait_for(BatchDone, "run a recorded batch")
                self._count("prefill batches")
                last = {part.room for part in message.requests if part.last}
                self._await_cover(last)
                if room in last:
                    return
        raise CpkvError("the recording ends before a room was computed", value=room)

    def _await_cover(self, rooms: set[int]) -> None:
        while not rooms <= self._covered:
            told = self._decode_link.wait_for(RoomCovered, "receive a replayed room")
            assert isinstance(told, RoomCovered)
            self._covered.add(told.room)

    def _count(self, what: str) -> None:
        self._done += 1
        self._on_progress(what, self._done, self._all)


def compare_recordings(first: Path, second: Path, cp_size: int) -> Comparison:
    """Compare every logit of two recordings as raw bits, ranks first, then decode."""
    prompt_rows = 0
    for rank in range(cp_size):
        equal, difference = compare_logits(
            first / f"rank{rank}", second / f"rank{rank}", f"rank {rank}"
        )
        prompt_rows += equal
        if difference is not None:
            return Comparison(prompt_rows, 0, difference)
    decode_rows, difference = compare_logits(first / "decode", second / "decode", "decode")
    return Comparison(prompt_rows, decode_rows, difference)


def _decode(data: bytes) -> Recorded:
    return RECORDED.decode(data)
