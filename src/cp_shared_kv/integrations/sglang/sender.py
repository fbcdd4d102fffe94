"""Prefill to decode: each rank sends the pages it owns, to the places of their positions."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import dataclasses
import logging

import numpy as np

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.integrations.sglang import versions
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages, Positions

_log = logging.getLogger(__name__)


def owned_pages(_original, kv_mgr, kv_indices, index_slice):
    """In place of filter_kv_indices_for_cp_rank: this rank's pages of a chunk, and where they go.

    kv_indices are logical pages, index_slice their range of positions in what decode reserved.
    Returns physical pages i32 and their positions i64; the caller indexes decode's pages with
    them as it would with a slice. The chunk's last page is known before this is called, so a
    rank that owns none of its pages concludes all the same.
    """
    positions = np.arange(index_slice.start, index_slice.stop, dtype=np.int64)
    physical, owned = _owned(kv_mgr, np.asarray(kv_indices), positions)
    return physical.astype(np.int32), owned


def admit_chunk(original, self, bootstrap_room, kv_indices, index_slice, *args, **kwargs):
    """Around add_transfer_request: positions outside the reservation fail the room, nothing else.

    In the thread that sends they would raise, and take the server down.
    """
    if isinstance(index_slice, np.ndarray) and index_slice.size:
        last = int(index_slice.max())
        for info in list(self.transfer_infos.get(bootstrap_room, {}).values()):
            if not info.is_dummy and last >= len(info.dst_kv_indices):
                return _fail(self, bootstrap_room, last, len(info.dst_kv_indices))
    return original(self, bootstrap_room, kv_indices, index_slice, *args, **kwargs)


def send_state(original, self, req, prefill_state_indices, *args, **kwargs):
    """Around maybe_send_extra: index K of the pages that this rank owns.

    Its failures are kept for `send_aux`, since the caller looks at that one's alone.
    """
    release = versions.release(versions.installed_version())
    assert release is not None
    if release.STATE_IS_LIST_OF_COMPONENTS:
        sources, destinations = [], []
        for kind, pages in enumerate(prefill_state_indices):
            # Decode may list fewer kinds; an exception here would end the server.
            wanted = req.dst_state_indices[kind] if kind < len(req.dst_state_indices) else []
            source, there = (None, wanted) if pages is None else _owned_state(self, pages, wanted)
            sources.append(source)
            destinations.append(there)
    else:
        sources, destinations = _owned_state(self, prefill_state_indices, req.dst_state_indices)
    mine = dataclasses.replace(req, dst_state_indices=destinations)
    status = original(self, mine, sources, *args, **kwargs)
    if status:
        _failed_rooms(self).add((req.room, req.mooncake_session_id))
    return status


def send_aux(original, self, req, *args, **kwargs):
    """Around send_aux, the last step of a room: it fails where index K has failed before."""
    key = (req.room, req.mooncake_session_id)
    if key in _failed_rooms(self):
        _failed_rooms(self).discard(key)
        _log.error("CP shared KV: room %s failed, since its index K was not sent", req.room)
        return -1
    return original(self, req, *args, **kwargs)


def _owned(kv_mgr, logical_pages, positions) -> tuple[PhysicalPages, Positions]:
    return _layout(kv_mgr).filter_owned_pages(
        LogicalPages(logical_pages.astype(np.int64)), Positions(positions)
    )


def _owned_state(kv_mgr, logical_pages, destinations) -> tuple[list[int], list[int]]:
    """Position by position, as far as both go: what SGLang does with lists of unequal length."""
    count = min(len(logical_pages), len(destinations))
    positions = np.arange(count, dtype=np.int64)
    physical, owned = _owned(kv_mgr, np.asarray(logical_pages)[:count], positions)
    return physical.tolist(), [int(destinations[position]) for position in owned]


def _layout(kv_mgr) -> CpSharedKVLayout:
    """From what the manager itself has registered, so that it cannot send what it does not hold."""
    layout = getattr(kv_mgr, "cp_shared_kv_layout", None)
    if layout is None:
        args = kv_mgr.kv_args
        pages = {
            data_bytes // page_bytes
            for lengths, items in (
                (args.kv_data_lens, args.kv_item_lens),
                _flat_state(args.state_data_lens, args.state_item_lens),
            )
            for data_bytes, page_bytes in zip(lengths, items, strict=True)
        }
        if len(pages) != 1:
            raise LayoutError(
                "pages of the layers to send", value=sorted(pages), allowed="one size"
            )
        layout = CpSharedKVLayout(
            args.page_size, kv_mgr.attn_cp_size, kv_mgr.attn_cp_rank, physical_pages=pages.pop() - 1
        )
        kv_mgr.cp_shared_kv_layout = layout
    return layout


def _flat_state(lengths, items) -> tuple[list[int], list[int]]:
    """State sizes, which are a list for each kind of state in newer releases."""
    if lengths and isinstance(lengths[0], list):
        return [n for part in lengths for n in part], [n for part in items for n in part]
    return lengths, items


def _failed_rooms(kv_mgr) -> set[tuple[int, str]]:
    # One thread sends all of a session, so a plain set will do.
    return kv_mgr.__dict__.setdefault("cp_shared_kv_failed_rooms", set())


def _fail(kv_mgr, room: int, last: int, reserved: int) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    reason = f"position {last} outside the {reserved} pages that decode reserved"
    _log.error("CP shared KV: room %s failed: %s", room, reason)
    kv_mgr.record_failure(room, reason)
    kv_mgr.update_status(room, KVPoll.Failed)
    rank = kv_mgr.attn_tp_rank * kv_mgr.pp_size * kv_mgr.attn_cp_size
    rank += kv_mgr.pp_rank * kv_mgr.attn_cp_size + kv_mgr.attn_cp_rank
    for info in kv_mgr.transfer_infos[room].values():
        kv_mgr.sync_status_to_decode_endpoint(
            info.endpoint, info.dst_port, info.room, KVPoll.Failed, rank
        )
