"""Thousands of worlds, each from its seed; and broken engines, which must be found out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from cp_shared_kv.engine import client as client_module
from cp_shared_kv.engine import decode as decode_module
from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.decode import DecodeEngine
from cp_shared_kv.engine.decode_room import DecodeRoom
from cp_shared_kv.engine.decode_running import RunningRooms
from cp_shared_kv.engine.prefill import PrefillController
from cp_shared_kv.engine.presence import Presence
from cp_shared_kv.engine.request import PrefillRequest, Stage
from cp_shared_kv.engine.router import Router
from cp_shared_kv.engine.scheduler import PrefillScheduler
from cp_shared_kv.engine.transfer_peer import TransferPeer
from cp_shared_kv.engine.transfer_sender import TransferSender
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_keys import page_keys
from cp_shared_kv.testing.world.run import run
from cp_shared_kv.transfer.actions import DecodeAction, PrefillAction, SendMessage
from cp_shared_kv.transfer.decode_session import DecodeSession, DecodeState, acknowledgement
from cp_shared_kv.transfer.messages import Concluded
from cp_shared_kv.transfer.prefill_session import PrefillSession

CI_SEEDS, SOAK_SEEDS = 500, 10_000
GROUP_OF_SEEDS = 50
MUTANT_SEEDS = 300


def assert_every_promise_holds(seeds: range) -> None:
    for seed in seeds:
        outcome = run(seed)
        assert outcome.broken is None, outcome.report(lines=120)


@pytest.mark.parametrize("first", range(0, CI_SEEDS, GROUP_OF_SEEDS))
def test_every_promise_holds_in_every_world(first: int) -> None:
    assert_every_promise_holds(range(first, first + GROUP_OF_SEEDS))


@pytest.mark.parametrize(
    "seed", [508, 616, 707, 1124, 1921, 2362, 2686, 5771, 6645, 7315, 8083, 8681]
)
def test_worlds_in_which_a_promise_was_once_broken(seed: int) -> None:
    assert_every_promise_holds(range(seed, seed + 1))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(CI_SEEDS, SOAK_SEEDS, 500))
def test_every_promise_holds_in_ten_thousand_worlds(first: int) -> None:
    assert_every_promise_holds(range(first, first + 500))


def test_all_that_can_go_wrong_does() -> None:
    """Worlds in which nothing happens would keep every promise."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen += run(seed).seen
    missing = [what for what in WORTH_SEEING if not seen[what]]
    assert not missing, (missing, seen)


WORTH_SEEING = [
    "answered: stop",
    "answered: length",
    "answered: enough",
    "answered: left",
    "answered: failed",
    "answered: unavailable",
    "answered: overloaded",
    "answered: too_long",
    "answered: connection",
    "another try",
    "killed: prefill",
    "killed: decode",
    "killed: server",
    "stopped",
    "hung",
    "message lost",
    "message doubled",
    "message overtaken",
    "a write of it broke",
    "a page of it was damaged",
    "write in part",
    "stray landed",
    "bytes of the dead landed",
    "prefix found by prefill",
    "prefix held by decode",
    "pages evicted",
    "longest prompt",
    "worker lost while it was being connected",
    "largest reservation",
]


def test_a_seed_says_all_in_another_process_too() -> None:
    """Whatever a failing seed shows, it shows again: nothing else is left to chance."""
    seeds = [3, 14, 27]
    program = (
        "import sys\n"
        "from cp_shared_kv.testing.world.run import run\n"
        f"for seed in {seeds}:\n"
        "    sys.stdout.write(run(seed).report())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    told = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout == "".join(run(seed).report() for seed in seeds)


# Engines that are broken ----------------------------------------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[Break, str]] = {}


def mutant(found_by: str) -> Callable[[Break], Break]:
    """A way to break the engine, and what the world says when it has found that out."""

    def enter(change: Break) -> Break:
        MUTANTS[change.__name__] = change, found_by
        return change

    return enter


@mutant("has given the pages of room")
def decode_frees_quarantined_pages_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeSession, "_all_quiescent", lambda self: True)


@mutant("does not come to rest")
def a_rank_without_pages_of_a_prompt_forgets_to_conclude(patch: pytest.MonkeyPatch) -> None:
    conclude = PrefillSession._conclude_when_flushed

    def forgets(self: PrefillSession) -> list[PrefillAction]:
        return conclude(self) if self._sent else []

    patch.setattr(PrefillSession, "_conclude_when_flushed", forgets)


@mutant("has given the pages of room")
def prefill_releases_pages_when_the_first_rank_has_concluded(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: PrefillScheduler, request: PrefillRequest) -> PrefillRequest | None:
        if request.stage is not Stage.SENDING or not request.concluded_ranks:
            return None
        self.pool.release(request.room)
        return self._requests.pop(request.room)

    patch.setattr(PrefillScheduler, "_finish_if_quiet", hasty)


@mutant("covered means an exact cover")
def decode_starts_with_the_first_token(patch: pytest.MonkeyPatch) -> None:
    start = DecodeEngine._start_if_ready

    def hasty(self: DecodeEngine, name: int) -> None:
        session = self._rooms[name].session
        if session is not None and session.state is DecodeState.RECEIVING:
            session.state = DecodeState.COVERED
        start(self, name)

    patch.setattr(DecodeEngine, "_start_if_ready", hasty)


@mutant("does not come to rest")
def ranks_say_nothing_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillSession, "resend_due", lambda self: [])


@mutant("does not come to rest")
def decode_acknowledges_before_all_that_is_counted_has_come(patch: pytest.MonkeyPatch) -> None:
    take = DecodeSession._take_concluded

    def hasty(self: DecodeSession, message: Concluded, record: Any) -> list[DecodeAction]:
        return [SendMessage(acknowledgement(message)), *take(self, message, record)]

    patch.setattr(DecodeSession, "_take_concluded", hasty)


@mutant("has given the pages of room")
def a_stray_write_counts_as_over(patch: pytest.MonkeyPatch) -> None:
    failed = PrefillSession.write_failed

    def trusting(
        self: PrefillSession, chunk: int, reason: str, *, quiescent: bool
    ) -> list[PrefillAction]:
        return failed(self, chunk, reason, quiescent=True)

    patch.setattr(PrefillSession, "write_failed", trusting)


@mutant("does not come to rest")
def nobody_looks_for_a_lost_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferSender, "_drained", lambda self, rooms: None)


@mutant("has given the pages of room")
def ranks_count_a_dead_worker_as_forgotten_when_they_ask_for_it(patch: pytest.MonkeyPatch) -> None:
    disconnect = TransferPeer._disconnect

    def hasty(self: TransferPeer) -> None:
        disconnect(self)
        self._end()

    patch.setattr(TransferPeer, "_disconnect", hasty)


@mutant("does not come to rest")
def ranks_do_not_hear_of_what_their_side_calls_come_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferPeer, "collect", lambda self: None)


@mutant("does not come to rest")
def ranks_do_not_hear_of_aborts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferSender, "abort", lambda self, message: None)


@mutant("does not come to rest")
def decode_does_not_hear_of_dead_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeEngine, "peer_dead", lambda self, peer, reason: None)


@mutant("does not come to rest")
def prefill_does_not_hear_of_dead_workers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillController, "decode_lost", lambda self, life, reason: None)


@mutant("does not come to rest: client")
def the_router_sends_to_the_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Router, "lost", lambda self, life: None)
    patch.setattr(Presence, "lost", lambda self, life: None)
    patch.setattr(Presence, "answering", Presence.known)


@mutant("had no token and has not begun again")
def a_request_is_given_up_with_the_first_process_that_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(client_module, "MOST_LOSSES", 0)


@mutant("and it holds something else")
def decode_publishes_a_token_that_no_step_has_followed(patch: pytest.MonkeyPatch) -> None:
    def eager(self: RunningRooms, room: DecodeRoom) -> None:
        tokens = np.append(room.offer.tokens(), np.asarray(room.generated, dtype=np.int64))
        self._pool.publish(room.offer.room, page_keys(tokens, self._pool.page_size))

    patch.setattr(RunningRooms, "_publish", eager)


@mutant("and it holds something else")
def half_a_page_is_sent_with_the_chunk_that_begins_it(patch: pytest.MonkeyPatch) -> None:
    build = PrefillScheduler._build

    def eager(self: PrefillScheduler, chosen: list[tuple[PrefillRequest, int]]) -> Batch:
        batch = build(self, chosen)
        parts = [
            replace(part, send_stop=max(len(part.pages()), part.send_start))
            for part in batch.requests
        ]
        for part in parts:
            self._requests[part.room].next_position = part.send_stop
        return replace(batch, requests=parts)

    patch.setattr(PrefillScheduler, "_build", eager)


@mutant("and it holds something else")
def checksums_are_sent_and_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decode_module, "damaged_page", lambda session, checksums: None)


@mutant("are not the pool's pages")
def a_released_room_keeps_its_private_pages(patch: pytest.MonkeyPatch) -> None:
    def leaky(self: LogicalPool, room: int) -> None:
        self._requests.close(room)
        self._cache.unlock(self._rooms.pop(room).end)

    patch.setattr(LogicalPool, "release", leaky)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_engine_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, found_by = MUTANTS[name]
    change(monkeypatch)
    assert any(found_by in (run(seed).broken or "") for seed in range(MUTANT_SEEDS))
