"""From decode's answer to an offer to the room that the ranks open."""

from __future__ import annotations

from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.request import PrefillRequest
from cp_shared_kv.engine.sampling.state import prompt_tokens_for_sampling
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import OpenRoom, Reserve


def opened_room(message: Reserve, request: PrefillRequest, limits: EngineLimits) -> OpenRoom:
    """What the ranks are told of a room, by a reservation of the request's own decode worker.

    ValueError for one that no rank could use: it stops here, not at all of them.
    """
    message.reservation(limits.decode_capacity.physical_pages)
    return OpenRoom(
        epoch=message.peer_epoch,
        room=message.room,
        decode_epoch=message.epoch,
        first_position=message.first_position,
        physical_pages=message.physical_pages,
        total_positions=-(-request.prompt_tokens // limits.page_size),
        sampling=request.sampling,
        prompt_token_ids=pack_int64(
            prompt_tokens_for_sampling(request.sampling, request.token_ids)
        ),
    )
