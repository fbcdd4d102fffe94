"""Mutated messages on every link: refused or handled, and nothing else happens.

Five ways in. Every decoder alone; a whole group without processes, where mutants arrive between
the messages of real requests (testing/hostile_group.py); a rank worker with its model and shared
memory (testing/hostile_worker.py); supervisors of two hosts; and the server's client. A seed that
fails says so and can be run alone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.engine import codecs
from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.example_messages import ENGINE_MESSAGES, TRANSFER_MESSAGES
from cp_shared_kv.testing.hostile_group import (
    FROM_RANKS,
    PAIR,
    SERVER_LINKS,
    TO_RANKS,
    HostileGroup,
    Link,
)
from cp_shared_kv.testing.hostile_worker import HostileWorker
from cp_shared_kv.testing.mutations import Mutator
from cp_shared_kv.transfer.codec import Codec

from .mutants_between_hosts import guest_mutants, home_mutants
from .mutants_to_client import client_mutants

DECODERS: dict[str, Codec[Any]] = {
    "server to engine": codecs.FROM_SERVER,
    "engine to server": codecs.TO_SERVER,
    "controller to rank": codecs.TO_RANK,
    "rank to controller": codecs.FROM_RANK,
    "decode to rank": codecs.DECODE_TO_RANK,
    "decode to controller": codecs.DECODE_TO_CONTROLLER,
    "to decode": codecs.TO_DECODE,
    "supervisor to child": codecs.FROM_SUPERVISOR,
    "satellite to supervisor": codecs.FROM_SATELLITE,
    "supervisor to satellite": codecs.TO_SATELLITE,
    "recording": codecs.RECORDED,
}
HOSTILE: dict[str, frozenset[Link]] = {
    "clients, and decode to the ranks": SERVER_LINKS | TO_RANKS,
    "the ranks": FROM_RANKS,
    "controller and decode": PAIR,
    "all at once": SERVER_LINKS | TO_RANKS | FROM_RANKS | PAIR,
}
STEPS = 150


def group_mutants(hostile: frozenset[Link], at_least: int) -> tuple[int, int]:
    """Run groups until so many mutants have arrived; how many did, and how many were refused."""
    mutants = refused = 0
    for seed in itertools.count():
        if mutants >= at_least:
            return mutants, refused
        try:
            group = HostileGroup(seed, hostile)
            group.run(STEPS)
            group.settle()
        except Exception as error:
            error.add_note(f"seed {seed} with {sorted(hostile)}")
            raise
        mutants += group.mutants
        refused += group.refused
    raise AssertionError


def rank_mutants(directory: Path, at_least: int) -> tuple[int, int]:
    with HostileWorker(directory, seed=at_least) as worker:
        while worker.mutants < at_least:
            worker.one_room()
        return worker.mutants, worker.refused


def decoder_mutants(codec: Codec[Any], count: int) -> int:
    """Decode so many mutants of messages of all kinds; how many were refused."""
    chance = random.Random(count)
    mutator = Mutator(chance)
    valid = [encode(message) for message in [*ENGINE_MESSAGES, *TRANSFER_MESSAGES]]
    refused = 0
    for _ in range(count):
        mutant = mutator.mutate(chance.choice(valid))
        try:
            message = codec.decode(mutant)
        except ProtocolError:
            refused += 1
        else:
            again = encode(message)  # whole: it can be said again, and is then the same
            assert encode(codec.decode(again)) == again
    return refused


@pytest.mark.parametrize("link", DECODERS)
def test_every_decoder_takes_a_whole_message_or_raises_protocol_error(link: str) -> None:
    refused = decoder_mutants(DECODERS[link], 1000)
    assert 500 < refused < 1000  # some are let in: the mutants are not all noise


@pytest.mark.parametrize("who", HOSTILE)
def test_mutants_among_the_messages_of_a_group(who: str) -> None:
    mutants, refused = group_mutants(HOSTILE[who], 3500)
    assert mutants // 2 < refused < mutants


def test_mutants_from_the_controller_to_a_rank(tmp_path: Path) -> None:
    mutants, refused = rank_mutants(tmp_path, 500)
    assert mutants // 2 < refused < mutants


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_mutants(tmp_path: Path) -> None:
    total = 0
    for hostile in HOSTILE.values():
        total += group_mutants(hostile, 20_000)[0]
    total += rank_mutants(tmp_path, 10_000)[0]
    for codec in DECODERS.values():
        decoder_mutants(codec, 2000)
        total += 2000
    total += guest_mutants(4000) + home_mutants(4000)
    total += asyncio.run(client_mutants(200))
    assert total > 100_000


def test_mutants_from_the_supervisor_to_a_satellite() -> None:
    assert home_mutants(1000) == 1000


def test_mutants_from_a_satellite_to_the_supervisor() -> None:
    assert guest_mutants(1000) == 1000


def test_mutants_from_the_engine_to_the_server() -> None:
    assert asyncio.run(client_mutants(60)) > 1000
