"""Who answers: by when they were asked, not by the clock alone."""

from __future__ import annotations

from cp_shared_kv.engine.figures import SILENCE_SECONDS
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.presence import Presence
from cp_shared_kv.engine.router import Route

GROUP, DECODE, OTHER = Life("prefill", 0, 1), Life("decode", 0, 1), Life("decode", 1, 1)
PAIRS = [Route(GROUP, DECODE), Route(GROUP, OTHER)]


def presence(**heard_seconds: float) -> Presence:
    """Asked at 100 s; who was heard when."""
    who = Presence(100.0)
    for name, seconds in heard_seconds.items():
        who.heard({"group": GROUP, "decode": DECODE, "other": OTHER}[name], seconds)
    return who


def test_a_pair_is_known_when_both_ends_have_said_a_word() -> None:
    who = presence(group=99.0, decode=99.0)
    assert who.known(PAIRS) == [PAIRS[0]]
    who.heard(OTHER, 99.0)
    assert who.known(PAIRS) == PAIRS
    who.lost(GROUP)
    assert who.known(PAIRS) == []
    assert who.silence(PAIRS, 200.0) is None


def test_a_pair_answers_unless_an_end_was_silent_for_long_when_it_was_asked() -> None:
    who = presence(group=99.0, decode=100.0 - SILENCE_SECONDS, other=99.9 - SILENCE_SECONDS)
    assert who.answering(PAIRS) == [PAIRS[0]]
    assert who.silence(PAIRS, 100.0) is None


def test_time_that_goes_by_without_a_question_is_nobodys_silence() -> None:
    who = presence(group=99.0, decode=99.0)
    assert who.silence(PAIRS, 10_000.0) is None  # the client itself was stopped
    who.asked(10_000.0)
    assert who.silence(PAIRS, 10_000.0) == "the engine has not answered for 9901 s"


def test_silence_is_that_of_the_pair_that_was_heard_last() -> None:
    who = presence(group=80.0, decode=50.0, other=70.0)
    assert who.silence(PAIRS, 100.0) == "the engine has not answered for 30 s"


def test_how_long_each_has_been_silent_is_told_of_those_that_live() -> None:
    who = presence(group=99.0, decode=90.0, other=1.0)
    who.lost(OTHER)
    assert who.silent_seconds(100.0) == {GROUP: 1.0, DECODE: 10.0}


def test_a_word_after_a_silence_is_told_from_others() -> None:
    who = presence(group=99.0)
    assert not who.heard(GROUP, 100.0)
    assert who.heard(DECODE, 100.0)  # its first
    who.asked(101.0 + SILENCE_SECONDS)
    assert who.heard(GROUP, 102.0 + SILENCE_SECONDS)
    assert not who.heard(GROUP, 103.0 + SILENCE_SECONDS)
