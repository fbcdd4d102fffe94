"""The noise is a function of seed, position and token, and draws follow the probabilities."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from cp_shared_kv.engine.sampling.gumbel import draw, gumbel_noise

MASK = (1 << 64) - 1
PROBABILITIES = np.array([0.3, 0.05, 0.2, 0.15, 0.1, 0.12, 0.08])
CRITICAL = {3: 16.27, 4: 18.47, 6: 22.46}
"""Chi-square at 0.001, by degrees of freedom. Seeds are fixed, so no test is a matter of luck."""


def philox4x64_10(counter: list[int], key: list[int]) -> list[int]:
    """Salmon et al. 2011, figure 4 and section 4.3, in integers without end."""
    for turn in range(10):
        if turn:
            key = [(key[0] + 0x9E3779B97F4A7C15) & MASK, (key[1] + 0xBB67AE8584CAA73B) & MASK]
        first, second = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [
            (second >> 64) ^ counter[1] ^ key[0],
            second & MASK,
            (first >> 64) ^ counter[3] ^ key[1],
            first & MASK,
        ]
    return counter


def test_the_generator_written_out_gives_its_authors_known_answer() -> None:
    found = philox4x64_10([0] * 4, [0] * 2)
    assert [hex(word) for word in found] == [
        "0x16554d9eca36314c",
        "0xdb20fe9d672d0fdc",
        "0xd7e772cee186176b",
        "0x7e68b68aec7ba23b",
    ]


@pytest.mark.parametrize("seed", [0, 1, 987_654_321, -1, (1 << 63) - 1, -(1 << 63)])
@pytest.mark.parametrize("position", [0, 1, 70_000])
def test_noise_is_philox_keyed_by_seed_and_position(seed: int, position: int) -> None:
    ids = np.array([0, 1, 4, 7, 1002], dtype=np.int64)
    found = gumbel_noise(seed, position, ids)
    for token, noise in zip(ids.tolist(), found.tolist(), strict=True):
        # NumPy raises the counter before each block of four words.
        block = philox4x64_10([token // 4 + 1, 0, 0, 0], [seed & MASK, position])
        uniform = ((block[token % 4] >> 12) + 0.5) / 2**52
        assert noise == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


def test_the_two_ends_of_the_noise_are_finite() -> None:
    for word in (0, (1 << 52) - 1):
        uniform = (word + 0.5) * 2.0**-52
        assert 0.0 < uniform < 1.0
        assert math.isfinite(-math.log(-math.log(uniform)))


def drawn(scores: npt.NDArray[np.float32], seeds: list[int], positions: range) -> list[int]:
    return [draw(scores, seed, position) for seed in seeds for position in positions]


def chi_square(tokens: list[int], probabilities: npt.NDArray[np.float64]) -> float:
    expected = probabilities * len(tokens)
    found = np.bincount(tokens, minlength=len(probabilities))
    return float(((found - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [([1], range(8000)), (list(range(8000)), range(1)), (list(range(80)), range(100))],
    ids=["positions of a seed", "seeds at a position", "both"],
)
def test_draws_follow_the_probabilities(seeds: list[int], positions: range) -> None:
    scores = np.log(PROBABILITIES).astype(np.float32)
    assert chi_square(drawn(scores, seeds, positions), PROBABILITIES) < CRITICAL[6]


def test_one_draw_says_nothing_of_the_next() -> None:
    scores = np.zeros(2, dtype=np.float32)
    tokens = drawn(scores, [5], range(8001))
    pairs = [a * 2 + b for a, b in zip(tokens[:-1:2], tokens[1::2], strict=True)]
    assert chi_square(pairs, np.full(4, 0.25)) < CRITICAL[3]
    neighbours = [a * 2 + b for a, b in zip(tokens, drawn(scores, [6], range(8001)), strict=True)]
    assert chi_square(neighbours, np.full(4, 0.25)) < CRITICAL[3]


def test_what_is_left_after_a_filter_is_drawn_by_its_share_of_the_rest() -> None:
    scores = np.log(PROBABILITIES).astype(np.float32)
    scores[[0, 3]] = -np.inf
    rest = np.where(np.isinf(scores), 0, PROBABILITIES)
    tokens = drawn(scores, [9], range(8000))
    assert not {0, 3} & set(tokens)
    left = np.flatnonzero(rest)
    renamed = [int(np.searchsorted(left, token)) for token in tokens]
    assert chi_square(renamed, rest[left] / rest.sum()) < CRITICAL[4]


def test_a_token_that_is_all_there_is_is_drawn() -> None:
    scores = np.full(9, -np.inf, dtype=np.float32)
    scores[6] = -80.0
    assert set(drawn(scores, [1, 2], range(50))) == {6}


def test_where_nothing_is_left_the_lowest_id_is_drawn() -> None:
    assert draw(np.full(4, -np.inf, dtype=np.float32), 1, 0) == 0
