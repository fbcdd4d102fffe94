"""Recordings: what comes back, and that no difference and no loss goes unnoticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cp_shared_kv.engine.recording import (
    LogitsLog,
    MessageLog,
    check_recording_place,
    compare_logits,
    read_messages,
)
from cp_shared_kv.errors import ConfigError, CpkvError

VOCAB = 5


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def logits(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, VOCAB), np.float32)


def record(path: Path, second: np.ndarray | None = None, *, position: int = 11) -> Path:
    """Two batches: three rows of room 7, then two rows of rooms 7 and 8."""
    log = LogitsLog(path)
    log.append(1, rows(7, 7, 7), rows(0, 1, 2), logits(3))
    log.append(4, rows(7, 8), rows(3, position), logits(2, seed=1) if second is None else second)
    return path


def test_messages_come_back_in_order_while_the_log_is_open(tmp_path: Path) -> None:
    log = MessageLog(tmp_path / "made" / "on demand.messages")
    messages = [b"first", b"", b"x" * 70_000]
    for message in messages:
        log.append(message)
    assert list(read_messages(tmp_path / "made" / "on demand.messages")) == messages


@pytest.mark.parametrize("kept", [1, 7, 8, 9, 12, 14, 20])
def test_a_message_file_that_is_cut_off_is_an_error(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "cut.messages"
    log = MessageLog(path)
    log.append(b"first")
    log.append(b"second")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CpkvError, match=r"ends inside a message: .*cut\.messages"):
        list(read_messages(path))


def test_what_came_before_the_cut_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "cut.messages"
    log = MessageLog(path)
    log.append(b"first")
    log.append(b"second")
    path.write_bytes(path.read_bytes()[:-1])
    messages = read_messages(path)
    assert next(messages) == b"first"
    with pytest.raises(CpkvError):
        next(messages)


def test_a_length_beyond_the_file_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "huge.messages"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"data")
    with pytest.raises(CpkvError, match="ends inside a message"):
        list(read_messages(path))


def test_equal_recordings_are_equal_in_every_row(tmp_path: Path) -> None:
    first, second = record(tmp_path / "a" / "rank0"), record(tmp_path / "b" / "rank0")
    assert compare_logits(first, second, "rank 0") == (5, None)


def test_the_first_different_logit_is_named_with_the_bits_of_both(tmp_path: Path) -> None:
    changed = logits(2, seed=1)
    changed[1, 3] = np.nextafter(changed[1, 3], np.float32(np.inf))
    changed[1, 4] += 1
    first = record(tmp_path / "a" / "rank0")
    second = record(tmp_path / "b" / "rank0", changed)
    equal, difference = compare_logits(first, second, "rank 0")
    assert equal == 4
    assert difference is not None
    assert (difference.batch, difference.room, difference.position) == (4, 8, 11)
    assert difference.token_id == 3
    assert difference.first_bits == int(logits(2, seed=1).view(np.uint32)[1, 3])
    assert difference.second_bits == int(changed.view(np.uint32)[1, 3])
    first, second = logits(2, seed=1)[1, 3], changed[1, 3]
    assert str(difference) == (
        "rank 0: batch 4, token position 11, logit 3: "
        f"{float(first)!r} (0x{difference.first_bits:08x}) against "
        f"{float(second)!r} (0x{difference.second_bits:08x})"
    )


def test_bits_are_compared_and_not_numbers(tmp_path: Path) -> None:
    zeros, minus_zeros = np.zeros((2, VOCAB), np.float32), np.zeros((2, VOCAB), np.float32)
    minus_zeros[0, 2] = -0.0
    nans = np.full((2, VOCAB), np.nan, np.float32)
    a, b = record(tmp_path / "a", zeros), record(tmp_path / "b", minus_zeros)
    equal, difference = compare_logits(a, b, "decode")
    assert equal == 3
    assert difference is not None
    assert (difference.first_bits, difference.second_bits) == (0, 0x80000000)
    c, d = record(tmp_path / "c", nans), record(tmp_path / "d", nans)
    assert compare_logits(c, d, "decode") == (5, None)


@pytest.mark.parametrize("missing", ["a row", "a position", "all rows"])
def test_recordings_of_different_rows_are_refused(tmp_path: Path, missing: str) -> None:
    first = record(tmp_path / "a")
    if missing == "a row":
        second = tmp_path / "b"
        LogitsLog(second).append(1, rows(7, 7, 7), rows(0, 1, 2), logits(3))
    elif missing == "a position":
        second = record(tmp_path / "b", position=12)
    else:
        second = tmp_path / "b"
        LogitsLog(second)
    with pytest.raises(CpkvError, match="rank 3: the two recordings do not hold the same rows"):
        compare_logits(first, second, "rank 3")


def test_recordings_of_different_vocabularies_are_refused(tmp_path: Path) -> None:
    for name, vocab in (("a", 4), ("b", 6)):
        LogitsLog(tmp_path / name).append(1, rows(7), rows(0), np.zeros((1, vocab), np.float32))
    with pytest.raises(CpkvError, match="vocabulary"):
        compare_logits(tmp_path / "a", tmp_path / "b", "rank 0")


@pytest.mark.parametrize("kept", [0, 7, 50])
def test_logits_that_are_cut_off_are_refused(tmp_path: Path, kept: int) -> None:
    first, second = record(tmp_path / "a"), record(tmp_path / "b")
    file = second.with_suffix(".logits")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CpkvError, match=r"rank 0: .* cut off: .*b\.logits"):
        compare_logits(first, second, "rank 0")


def test_a_rank_without_rows_has_nothing_to_differ_in(tmp_path: Path) -> None:
    for name in ("a", "b"):
        LogitsLog(tmp_path / name).append(1, rows(), rows(), np.empty((0, VOCAB), np.float32))
    assert compare_logits(tmp_path / "a", tmp_path / "b", "rank 1") == (0, None)


@pytest.mark.parametrize("place", ["/proc/recording", "/dev/null", "/etc/passwd/recording"])
def test_a_place_that_takes_no_recording_is_refused_by_its_flag(place: str) -> None:
    with pytest.raises(ConfigError, match=rf"--record-batches can write no file .*: {place};"):
        check_recording_place(Path(place))


def test_a_place_for_a_recording_is_made_and_left_empty(tmp_path: Path) -> None:
    check_recording_place(tmp_path / "a" / "b")
    check_recording_place(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_disk_that_fills_is_told_with_flag_and_path(tmp_path: Path) -> None:
    for name in ("a.messages", "b.logits", "b.rows"):
        (tmp_path / name).symlink_to("/dev/full")
    log, rank = MessageLog(tmp_path / "a.messages"), LogitsLog(tmp_path / "b")
    full = "--record-batches cannot be written .No space left on device.: "
    with pytest.raises(CpkvError, match=f"{full}{tmp_path / 'a.messages'}; to change it: "):
        log.append(b"message")
    with pytest.raises(CpkvError, match=f"{full}{tmp_path / 'b'}; to change it: "):
        rank.append(1, rows(7), rows(0), logits(1))
