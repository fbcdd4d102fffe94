"""The reader and the scratch that go with a choice of --kv-read, for one rank."""

from __future__ import annotations

from typing import NamedTuple

from cp_shared_kv.engine.config_values import KVReader
from cp_shared_kv.engine.rank_pools import RankPools
from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.mapped_buffers import MappedBuffer
from cp_shared_kv.memory.symmetric_buffers import SymmetricBuffer
from cp_shared_kv.reads.cheaper_read import CheaperRead
from cp_shared_kv.reads.forward_kv import SparseReads
from cp_shared_kv.reads.full_view import FullViewReader
from cp_shared_kv.reads.group import CPGroup, GpuGroup
from cp_shared_kv.reads.peer_pull import PeerPullReader
from cp_shared_kv.reads.peer_push import PeerPushReader
from cp_shared_kv.reads.peer_reader import PeerReader
from cp_shared_kv.reads.prefix_reader import LocalReader, PrefixReader
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.pull_rows import PullRowsReader
from cp_shared_kv.reads.read_ahead import ReadAhead, StreamLane
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.reads.selected_rows import SelectedRowsReader, fetches_rows
from cp_shared_kv.reads.symmetric_scratch import SymmetricScratch


class KVReads(NamedTuple):
    """What reads the group's pages, and the scratch that a forward takes."""

    reader: PrefixReader
    scratch: Scratch
    sparse: SparseReads | None = None
    ahead: ReadAhead | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes copied from the pools of the group, this rank's own among them.

        Without rows that a GPU has selected by itself: the host never learns how many.
        """
        rows = None if self.sparse is None else self.sparse.rows
        selected = rows.bytes_read if isinstance(rows, PullRowsReader) else 0
        return self.reader.bytes_read + selected


def make_reader(
    kv_read: KVReader,
    pools: RankPools,
    group: CPGroup,
    scratch_limit_bytes: int,
    most_tokens: int | None = None,
    *,
    index_topk: int,
    in_blocks: bool = False,
) -> KVReads:
    """The reads of one rank. Any rank, same choice.

    `most_tokens` of a prefix are held at once where selected rows are read, and two layers of them
    where GPUs read ahead; any number if None. `in_blocks` if longer ones are to come. `index_topk`:
    rows that a token selects. ConfigError for pull, push, sparse or blocks between GPUs that cannot
    map each other; what is left to choose goes by collective there.
    """
    pool, device = pools.pool, pools.pool.buffer.tensor.device
    if device.type == "cpu":
        scratch = Scratch(scratch_limit_bytes)
        if kv_read == "pull":
            return KVReads(PullReader(group, pools.peers), scratch)
        if kv_read == "sparse":
            rows = PullRowsReader(pools.peers, scratch)
            return KVReads(PullReader(group, pools.peers), scratch, SparseReads(rows, most_tokens))
        if kv_read == "collective":
            return KVReads(FullViewReader(group, pool, scratch), scratch)
        return KVReads(LocalReader(), scratch)
    if kv_read == "cheapest" and isinstance(pool.buffer, PrivateBuffer):
        if in_blocks:
            raise ConfigError(
                "--kv-scratch-tokens on GPUs that cannot read each other's memory",
                value=most_tokens,
                change="drop it: whole prefixes go by collective here",
            )
        kv_read = "collective"
    if kv_read == "local":
        return KVReads(LocalReader(), Scratch(scratch_limit_bytes, device))
    if kv_read == "collective":
        scratch = Scratch(scratch_limit_bytes, device)
        return KVReads(FullViewReader(group, pool, scratch), scratch)
    most_pages = None if most_tokens is None else most_tokens // pool.spec.page_size
    ahead = ReadAhead(StreamLane(device), most_pages)
    if kv_read in ("push", "cheapest"):
        assert isinstance(group, GpuGroup), "a rank on a GPU has the group for it"
        written_to = SymmetricScratch(
            scratch_limit_bytes,
            group.gpu_process_group if group.ranks_share_gpus else group.host_process_group,
            device,
            MappedBuffer if group.ranks_share_gpus else SymmetricBuffer,
        )
        push = PeerPushReader(group.cp_rank, pool, written_to)
        if kv_read == "push":
            return KVReads(push, written_to, ahead=ahead)
        pull = PeerPullReader(group.cp_rank, pool)
        whole = PeerReader(pull, push)
        if not fetches_rows(pool.spec.latent):
            return KVReads(whole, written_to, ahead=ahead)
        row_reader = SelectedRowsReader(pull, group.cp_size, pool, written_to)
        chosen = CheaperRead(pool.spec, index_topk, most_tokens).is_sparse
        return KVReads(whole, written_to, SparseReads(row_reader, most_tokens, chosen), ahead)
    scratch, pull = Scratch(scratch_limit_bytes, device), PeerPullReader(group.cp_rank, pool)
    if kv_read == "pull":
        return KVReads(pull, scratch, ahead=ahead)
    row_reader = SelectedRowsReader(pull, group.cp_size, pool, scratch)
    return KVReads(pull, scratch, SparseReads(row_reader, most_tokens), ahead)
