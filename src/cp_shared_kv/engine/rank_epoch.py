"""All that a rank has from one `Configure` to the next: pools, runner, transfers, open rooms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import BatchDone, Configure, DisconnectDecode, RoomToken
from cp_shared_kv.engine.model_runner import ModelRunner
from cp_shared_kv.engine.model_spec import ModelDescription
from cp_shared_kv.engine.rank_pools import RankPools
from cp_shared_kv.engine.readers import make_reader
from cp_shared_kv.engine.recording import LogitsLog
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.engine.transfer_peers import TransferPeers
from cp_shared_kv.engine.transfer_sender import TransferSender
from cp_shared_kv.errors import LayoutError, ProtocolError
from cp_shared_kv.layout.pages import LogicalPages, Positions
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.group import CPGroup, GpuGroup
from cp_shared_kv.transfer.messages import AbortRoom, Concluded, OpenRoom, Quiesced, Sent

Send = Callable[[msgspec.Struct], None]


@dataclass(frozen=True)
class _Unchosen:
    """How a room's first token is to be chosen, and for which decode worker."""

    sampling: SamplingState
    decode_epoch: int


class RankEpoch:
    """One rank in one epoch. Making it and `run` are collective: all ranks, the same messages."""

    def __init__(
        self,
        configure: Configure,
        spec: RunSpec,
        life: Life,
        model: ModelDescription,
        transformer: Transformer,
        group: CPGroup,
        peers: TransferPeers,
        *,
        to_decode: Callable[[Sent | Concluded | Quiesced], None],
        to_controller: Send,
    ) -> None:
        _check_sizes(configure, spec.limits)
        rank = group.cp_rank
        self._configure, self._spec, self._group = configure, spec, group
        self._to_controller = to_controller
        device = transformer.device
        if configure.shared and device.type == "cuda":
            assert isinstance(group, GpuGroup), "a rank on a GPU has the group for it"
            self._pools = RankPools.make_on_gpus(
                model.pool_spec, configure.physical_pages, group, device
            )
        elif configure.shared:
            names = [
                spec.region_name(life, f"rank{r}", configure.epoch) for r in range(group.cp_size)
            ]
            self._pools = RankPools.make_shared(
                model.pool_spec, configure.physical_pages, group, names
            )
        else:
            self._pools = RankPools.make_replicated(
                model.pool_spec, configure.physical_pages, device
            )
        self._reads = make_reader(
            configure.kv_read,
            self._pools,
            group,
            configure.scratch_limit_bytes,
            spec.limits.kv_scratch_tokens,
            index_topk=model.config.index_topk,
            in_blocks=spec.engine_config().kv_scratch_tokens is not None,
        )
        record = configure.record
        self._runner = ModelRunner(
            transformer,
            self._pools.pool,
            self._pools.layout,
            group,
            self._reads,
            spec.engine_config().nsa_prefill_cp_mode,
            None if record is None else LogitsLog(Path(record) / f"rank{rank}"),
        )
        self.sender = TransferSender(
            self._pools.layout,
            self._pools.pool,
            peers,
            rank=rank,
            epoch=configure.epoch,
            sends_nothing=not configure.shared and rank > 0,
            verify=spec.engine_config().verify_kv_transfer,
            to_decode=to_decode,
            to_controller=to_controller,
        )
        self._unchosen: dict[int, _Unchosen] = {}
        """The open rooms whose first token has not been chosen."""
        self._flip_before = configure.flip_byte_before_batch

    @property
    def pool_bytes(self) -> int:
        """Size of this rank's pool."""
        return self._pools.pool.buffer.nbytes

    def open(self, message: OpenRoom) -> None:
        """Take a room, and how its first token is to be chosen should its last row be here."""
        sampling = SamplingState(
            message.sampling,
            vocab_size=self._spec.vocab_size,
            eos_token_ids=self._spec.eos_token_ids,
            prompt_token_ids=message.prompt_tokens(),
        )
        self.sender.open(message)
        self._unchosen[message.room] = _Unchosen(sampling, message.decode_epoch)

    def abort(self, message: AbortRoom) -> None:
        """Stop a room."""
        self.sender.abort(message)
        self._unchosen.pop(message.room, None)

    def decode_dead(self, message: DisconnectDecode) -> None:
        """A decode worker's process is gone, and the rest of its rooms' prompts will not come."""
        self.sender.decode_dead(message.decode_epoch, message.reason)
        self._unchosen = {
            room: unchosen
            for room, unchosen in self._unchosen.items()
            if unchosen.decode_epoch != message.decode_epoch
        }

    def run(self, batch: Batch) -> None:
        """One forward pass, then the transfer of what it completed. Collective."""
        if batch.epoch != self._configure.epoch:
            raise ProtocolError("batch of another epoch", value=batch.epoch)
        sharers = self._group.cp_size if self._configure.shared else 1
        batch.validate(
            page_size=self._spec.limits.page_size,
            logical_pages=self._configure.physical_pages * sharers,
            vocab_size=self._spec.vocab_size,
        )
        if self._flip_before == batch.batch_id:
            self._flip_a_bit(batch)
        sampling = {
            part.room: self._unchosen[part.room].sampling
            for part in batch.requests
            if part.room in self._unchosen
        }
        try:
            tokens = self._runner.execute(batch, sampling)
        except LayoutError as error:
            raise ProtocolError(f"batch {batch.batch_id} contradicts itself: {error}") from error
        self._to_controller(
            BatchDone(
                rank=self._group.cp_rank,
                batch_id=batch.batch_id,
                tokens=[
                    RoomToken(room=room, token_id=token.token_id, logprobs=token.logprobs)
                    for room, token in tokens.items()
                    if token is not None
                ],
                without_token=[room for room, token in tokens.items() if token is None],
                scratch_bytes=self._reads.scratch.bytes_in_use,
                read_bytes_total=self._reads.bytes_read,
            )
        )
        for part in batch.requests:
            self.sender.send_chunk(part)
            if part.last:
                self._unchosen.pop(part.room, None)

    def close(self) -> None:
        """Forget all rooms, and give the pools up as soon as no write reads from them. Does not
        wait for that: `TransferPeers.settle` does."""
        self.sender.close(self._pools.close)
        self._reads.scratch.close()

    def _flip_a_bit(self, batch: Batch) -> None:
        """Damage the first page here of the batch's prefixes, in its slightest: a test's wish."""
        for part in batch.requests:
            prefix = part.pages()[: part.prefix_tokens // self._spec.limits.page_size]
            owned, _ = self._pools.layout.filter_owned_pages(
                LogicalPages(prefix), Positions(np.arange(len(prefix)))
            )
            if len(owned):
                # In an fp32 page: a change of the first value by one part in 32,768.
                self._pools.pool.pages("latent", 0)[int(owned[0]), 1] ^= 0x01
                self._flip_before = None
                return


def _check_sizes(configure: Configure, limits: EngineLimits) -> None:
    """A pool or scratch larger than this run's is refused before a byte of it is asked for."""
    capacity = limits.capacity
    most_pages = capacity.physical_pages if configure.shared else capacity.logical_pages
    for what, value, most in (
        ("pages of a pool", configure.physical_pages, most_pages),
        ("bytes of scratch", configure.scratch_limit_bytes, limits.scratch_limit_bytes),
    ):
        if value > most:
            raise ProtocolError(f"more {what} than this run has", value=value, allowed=f"{most}")
