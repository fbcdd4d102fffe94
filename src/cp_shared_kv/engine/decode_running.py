"""The rooms at decode that generate: one forward pass over all, and what its tokens come to.

Every page of such a room is here, and no rank writes to it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import msgspec
import numpy as np

from cp_shared_kv.engine.api import FinishReason
from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.decode_room import DecodeRoom
from cp_shared_kv.engine.messages import NO_NUMBERS, Tokens
from cp_shared_kv.engine.model_runner import ModelRunner
from cp_shared_kv.engine.sampling.sampler import SampledToken
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_keys import page_keys
from cp_shared_kv.transfer.codec import pack_int64

Send = Callable[[msgspec.Struct], None]


class RunningRooms:
    """At most `max_running` take part in a step, in order of their start.

    `to_server` is told each token. A room that has ended, whose pages are kept for other prompts,
    goes to `release`; one whose logits are no numbers, with a reason, to `fail`.
    """

    def __init__(
        self,
        pool: LogicalPool,
        runner: ModelRunner,
        *,
        epoch: int,
        max_running: int,
        to_server: Send,
        record: Send,
        release: Callable[[int], None],
        fail: Callable[[int, str], None],
    ) -> None:
        self._pool = pool
        self._runner = runner
        self._epoch = epoch
        self._max_running = max_running
        self._to_server, self._record = to_server, record
        self._release, self._fail = release, fail
        self._rooms: dict[int, DecodeRoom] = {}
        self._next_batch_id = 0
        self.generated_total = 0

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, name: int) -> bool:
        return name in self._rooms

    def start(self, name: int, room: DecodeRoom, first_token: SampledToken) -> None:
        """A room begins, with the token that prefill's logits chose."""
        self._rooms[name] = room
        self._emit(name, first_token)

    def step(self) -> None:
        """One token for every room that takes part."""
        chosen = dict(islice(self._rooms.items(), self._max_running))
        self._next_batch_id += 1
        batch = decode_batch(
            chosen, self._pool.page_size, epoch=self._epoch, batch_id=self._next_batch_id
        )
        self._record(batch)
        sampling = {name: room.sampling for name, room in chosen.items()}
        for name, token in self._runner.execute(batch, sampling).items():
            if token is None:
                del self._rooms[name]
                self._fail(name, NO_NUMBERS)
            else:
                self._emit(name, token)

    def abort(self, name: int) -> None:
        """A room is wanted no more."""
        self._finish(Tokens(room=name, token_ids=[], finish_reason="abort"))

    def _emit(self, name: int, token: SampledToken) -> None:
        room = self._rooms[name]
        room.generated.append(token.token_id)
        self.generated_total += 1
        stop = room.sampling.append(token.token_id)
        full = len(room.generated) >= room.offer.max_tokens
        reason: FinishReason | None = "stop" if stop else "length" if full else None
        told = Tokens(
            room=name,
            token_ids=[token.token_id],
            finish_reason=reason,
            logprobs=None if token.logprobs is None else [token.logprobs],
        )
        if reason is None:
            self._to_server(told)
        else:
            self._finish(told)

    def _finish(self, last: Tokens) -> None:
        self._publish(self._rooms.pop(last.room))
        self._to_server(last)
        self._release(last.room)

    def _publish(self, room: DecodeRoom) -> None:
        """Keep the pages that are written, prompt and output, for the prompts that go on from here.

        The last token's own KV was never computed: no step followed it.
        """
        tokens = np.append(room.offer.tokens(), np.asarray(room.generated[:-1], dtype=np.int64))
        self._pool.publish(room.offer.room, page_keys(tokens, self._pool.page_size))


def decode_batch(
    rooms: Mapping[int, DecodeRoom], page_size: int, *, epoch: int, batch_id: int
) -> Batch:
    """One new token for each of these rooms, which run."""
    parts: list[BatchRequest] = []
    tokens: list[int] = []
    for name, room in rooms.items():
        assert room.logical_pages is not None
        pages = room.logical_pages[: room.stored_tokens // page_size + 1]
        parts.append(
            BatchRequest(
                room=name,
                prefix_tokens=room.stored_tokens,
                new_tokens=1,
                logical_pages=pack_int64(pages),
                last=True,
            )
        )
        tokens.append(room.generated[-1])
    return Batch(
        epoch=epoch,
        batch_id=batch_id,
        token_ids=pack_int64(np.asarray(tokens, dtype=np.int64)),
        requests=parts,
    )
