"""A rank goes on while the transport waits for decode workers: to reach, find and forget them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cp_shared_kv.errors import ProtocolError, TransferError
from cp_shared_kv.testing.slow_rank import LIMIT_SECONDS, SlowRank, in_use, session, stray

SLOW, WELL = 20, 21
"""Epochs of two decode workers."""


@pytest.fixture
def rank() -> Iterator[SlowRank]:
    rank = SlowRank()
    yield rank
    for _ in range(9):  # no thread is left behind in a call
        rank.transport.go_on()


# Connecting -------------------------------------------------------------------------------------


def test_a_worker_that_does_not_answer_holds_up_nobody(rank: SlowRank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    rank.connect(WELL)
    rank.until(lambda: rank.answers)
    assert rank.answers == [(WELL, None)]
    rank.sends_to(WELL)
    rank.let_one_go_on()
    rank.until(lambda: len(rank.answers) == 2)
    assert rank.answers[1] == (SLOW, None)
    rank.sends_to(SLOW)


def test_a_room_for_a_worker_that_is_being_connected_is_refused(rank: SlowRank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    with pytest.raises(ProtocolError, match="not connected: 20; allowed: one of which"):
        rank.open(1, SLOW)
    assert rank.sender.open_rooms == []
    rank.let_one_go_on()
    rank.until(lambda: rank.answers)
    rank.open(1, SLOW)


def test_a_worker_that_cannot_be_reached_is_answered_for_and_forgotten(rank: SlowRank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    why = TransferError("it does not answer", kind="unreachable", peer="p", quiescent=True)
    rank.let_one_go_on(why)
    rank.until(lambda: rank.answers)
    assert rank.answers == [(SLOW, "it does not answer")]
    with pytest.raises(ProtocolError, match="not connected"):
        rank.open(1, SLOW)
    rank.let_one_go_on()
    rank.until(lambda: not rank.peers.unsettled)
    rank.transport.slow.clear()
    rank.connect(SLOW)
    rank.until(lambda: len(rank.answers) == 2)
    assert rank.answers[1] == (SLOW, None)


def test_a_worker_that_dies_while_it_is_connected_is_forgotten_when_that_has_ended(
    rank: SlowRank,
) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    rank.sender.decode_dead(SLOW, "killed")
    rank.sender.resend()
    rank.let_one_go_on()
    rank.let_one_go_on()
    rank.until(lambda: not rank.peers.unsettled)
    name = session(SLOW)
    assert rank.transport.calls == [
        f"connect {name}",
        f"connect {name} ends",
        f"disconnect {name}",
        f"disconnect {name} ends",
    ]
    assert rank.answers == []


def test_a_second_request_to_connect_changes_nothing_and_is_answered(rank: SlowRank) -> None:
    rank.connected(WELL)
    rank.connect(WELL)
    assert rank.answers == [(WELL, None)] * 2
    for changes, said in (
        ({"session_id": "another"}, "a second greeting"),
        ({"epoch": 22}, "two decode workers with one session"),
        ({"epoch": 23, "session_id": "x", "regions": ()}, "without memory"),
    ):
        with pytest.raises(ProtocolError, match=said):
            rank.connect(WELL, changes)
    assert rank.transport.calls == [f"connect {session(WELL)}"]
    rank.sends_to(WELL)


def test_asked_twice_while_a_worker_is_being_connected_the_rank_answers_once(
    rank: SlowRank,
) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    rank.connect(SLOW)
    rank.let_one_go_on()
    rank.until(lambda: rank.answers)
    assert rank.answers == [(SLOW, None)]


def test_a_fault_in_a_call_is_not_taken_for_an_unreachable_worker(rank: SlowRank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    rank.let_one_go_on(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        rank.until(lambda: rank.answers)


# Finding again ----------------------------------------------------------------------------------


def test_while_a_lost_worker_is_looked_for_others_are_sent_to(rank: SlowRank) -> None:
    rank.connected(SLOW, WELL)
    rank.transport.slow.add(session(SLOW))
    rank.send(1, SLOW).set_exception(stray())
    rank.sender.collect()
    rank.sender.resend()
    rank.sender.resend()
    rank.sends_to(WELL)
    assert rank.transport.calls.count(f"revive {session(SLOW)}") == 1
    rank.let_one_go_on()
    rank.until(lambda: rank.sender.unreachable(SLOW) is None)
    assert rank.kinds() == ["Quiesced", "RoomConcluded"]


def test_what_is_lost_while_a_worker_is_looked_for_waits_until_it_is_found_once_more(
    rank: SlowRank,
) -> None:
    """The transport may have found it before that write was begun, and says so after it."""
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    rank.send(1, SLOW).set_exception(stray())
    rank.sender.collect()
    rank.sender.resend()
    rank.send(2, SLOW).set_exception(stray())
    rank.sender.collect()
    assert rank.kinds() == ["Concluded", "Concluded", "Concluded"]
    rank.let_one_go_on()
    rank.until(lambda: rank.said)
    assert [message.room for message in rank.said] == [1, 1]  # type: ignore[attr-defined]
    assert rank.kinds() == ["Quiesced", "RoomConcluded"]
    assert rank.sender.unreachable(SLOW) is not None
    rank.sender.resend()
    rank.kinds()
    rank.let_one_go_on()
    rank.until(lambda: rank.sender.unreachable(SLOW) is None)
    assert [message.room for message in rank.said] == [2, 2]  # type: ignore[attr-defined]
    assert rank.kinds() == ["Quiesced", "RoomConcluded"]


def test_a_worker_that_refuses_a_write_while_it_is_looked_for_is_looked_for_again(
    rank: SlowRank,
) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    unreachable = TransferError("it is gone", kind="unreachable", peer="p", quiescent=True)
    rank.send(1, SLOW).set_exception(unreachable)
    rank.sender.collect()
    rank.sender.resend()
    rank.send(2, SLOW).set_exception(unreachable)
    rank.sender.collect()
    rank.let_one_go_on()
    rank.until(lambda: f"revive {session(SLOW)} ends" in rank.transport.calls)
    rank.until(lambda: rank.peers.to_find())
    assert rank.sender.unreachable(SLOW) == "it is gone"
    rank.transport.slow.clear()
    rank.sender.resend()
    rank.until(lambda: rank.sender.unreachable(SLOW) is None)


# Letting go -------------------------------------------------------------------------------------


def test_a_dead_worker_that_may_still_be_written_to_holds_up_nobody(rank: SlowRank) -> None:
    rank.connected(SLOW, WELL)
    rank.transport.slow.add(session(SLOW))
    rank.send(1, SLOW)
    rank.sender.decode_dead(SLOW, "killed")
    rank.sends_to(WELL)
    assert rank.sender.open_rooms == [1]
    rank.let_one_go_on(in_use())
    rank.until(lambda: rank.peers._peers[0].call is None)
    assert rank.sender.open_rooms == [1]
    rank.sender.resend()
    rank.let_one_go_on()
    rank.until(lambda: not rank.sender.open_rooms)
    assert rank.kinds() == ["RoomConcluded"]


def test_a_worker_that_dies_while_it_is_looked_for_is_forgotten_when_that_has_ended(
    rank: SlowRank,
) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    rank.send(1, SLOW).set_exception(stray())
    rank.sender.collect()
    rank.sender.resend()
    rank.sender.decode_dead(SLOW, "killed")
    assert rank.transport.calls[-1] == f"revive {session(SLOW)}"
    rank.let_one_go_on()
    rank.let_one_go_on()
    rank.until(lambda: not rank.sender.open_rooms)
    assert rank.transport.calls[-1] == f"disconnect {session(SLOW)} ends"


# The end of an epoch ----------------------------------------------------------------------------


class Closed:
    """Whether a pool was given up, which must not be registered any more then."""

    def __init__(self, rank: SlowRank) -> None:
        self._transport, self._region = rank.transport, rank.transport.regions[-1]
        self.done = False

    def __call__(self) -> None:
        assert self._region not in self._transport.regions
        self.done = True


def test_an_epoch_ends_at_once_and_its_pool_stays_until_nothing_can_be_written_from_it(
    rank: SlowRank,
) -> None:
    rank.connected(SLOW, WELL)
    rank.transport.slow.add(session(SLOW))
    rank.send(1, SLOW)
    closed = Closed(rank)
    rank.sender.close(closed)
    rank.peers.settle(0.0)
    rank.begin(epoch=11)
    rank.let_one_go_on(in_use())
    rank.until(lambda: rank.peers._peers[0].call is None)
    assert not closed.done
    assert rank.sender.open_rooms == []
    rank.sender.resend()
    rank.let_one_go_on()
    rank.until(lambda: closed.done)
    assert rank.peers.unsettled == []


def test_an_epoch_ends_while_a_worker_is_being_connected(rank: SlowRank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    closed = Closed(rank)
    rank.sender.close(closed)
    assert not closed.done
    rank.let_one_go_on()
    rank.let_one_go_on()
    rank.peers.settle(LIMIT_SECONDS)
    assert closed.done
    assert rank.transport.calls[-1] == f"disconnect {session(SLOW)} ends"
    assert rank.answers == []


def test_an_epoch_ends_while_a_dead_worker_is_let_go(rank: SlowRank) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    rank.sender.decode_dead(SLOW, "killed")
    closed = Closed(rank)
    rank.sender.close(closed)
    assert not closed.done
    rank.let_one_go_on()
    rank.peers.settle(LIMIT_SECONDS)
    assert closed.done
    assert rank.transport.calls.count(f"disconnect {session(SLOW)}") == 1


def test_a_pool_that_something_still_reads_is_given_up_later(rank: SlowRank) -> None:
    """What is on its way to a dead worker of another host ends when its connection does."""
    rank.connected(WELL)
    rank.transport.registered_too_long = 2
    closed = Closed(rank)
    rank.sender.close(closed)
    rank.peers.settle(LIMIT_SECONDS)
    assert not closed.done
    rank.peers.look()
    assert not closed.done
    rank.peers.look()
    assert closed.done


def test_waiting_for_a_worker_that_is_not_to_be_let_go_yet_ends_with_its_refusal(
    rank: SlowRank,
) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    closed = Closed(rank)
    rank.sender.close(closed)
    rank.let_one_go_on(in_use())
    rank.peers.settle(LIMIT_SECONDS)
    assert not closed.done


def test_a_later_epoch_reaches_a_worker_when_its_earlier_connection_has_gone(
    rank: SlowRank,
) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    closed = Closed(rank)
    rank.sender.close(closed)
    rank.begin(epoch=11)
    rank.answers.clear()
    rank.connect(SLOW)
    rank.sender.resend()
    rank.let_one_go_on(in_use())
    rank.until(lambda: rank.peers._peers[0].call is None)
    name = session(SLOW)
    assert rank.transport.calls == [f"connect {name}", f"disconnect {name}"]
    assert rank.answers == []
    rank.sender.resend()
    for _ in range(2):
        rank.let_one_go_on()
    rank.until(lambda: rank.answers)
    assert closed.done
    assert rank.transport.calls[2:] == [
        f"disconnect {name}",
        f"disconnect {name} ends",
        f"connect {name}",
        f"connect {name} ends",
    ]
    assert rank.answers == [(SLOW, None)]
    rank.sends_to(SLOW)


def test_a_connection_that_waits_its_turn_is_let_go_without_harm_to_the_one_before(
    rank: SlowRank,
) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    rank.sender.decode_dead(SLOW, "killed")
    rank.connect(SLOW)
    rank.sender.decode_dead(SLOW, "killed again")
    rank.let_one_go_on()
    rank.until(lambda: not rank.peers.unsettled)
    name = session(SLOW)
    assert rank.transport.calls == [
        f"connect {name}",
        f"disconnect {name}",
        f"disconnect {name} ends",
    ]
