"""Clients that are slow on purpose: half a head, part of a body, a stream that nobody reads."""

from __future__ import annotations

import json
import logging
import resource
import socket
import time
from contextlib import suppress

import pytest

from cp_shared_kv.server import patience, request_body, serve
from cp_shared_kv.server.connections import connection_limits

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LONG = {"context_length": 60_000, "logical_tokens": 60_000, "decode_tokens": 60_000}


def connect(port: int, receive_bytes: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", port))
    return connection


def request(**fields) -> bytes:
    body = json.dumps({"model": "fake-model", "prompt": "x", **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def answer(connection: socket.socket) -> bytes:
    received = b""
    while b"the answer" not in received:
        part = connection.recv(65536)
        assert part
        received += part
    return received


def ended(connection: socket.socket) -> bytes:
    """All that still comes, to the end of the answer or of the connection."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while not received.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            part = connection.recv(1 << 20)
            if not part:
                break
            received += part
    return bytes(received)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(patience, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.3)


@pytest.mark.parametrize("sent", [b"", b"P", HEAD, HEAD + b"X: " + b"y" * 1000])
def test_a_head_that_does_not_end_is_waited_for_a_while(hurried, server, engine, http, sent):
    connection = connect(server.port)
    connection.sendall(sent)
    started = time.monotonic()
    assert connection.recv(100) == b""
    assert time.monotonic() - started < 5
    assert http.get("/health").status_code == 200
    assert engine.requests == []


def test_a_trickle_of_bytes_gives_no_more_time(hurried, server, engine):
    connection = connect(server.port)
    connection.settimeout(0.05)
    for _ in range(100):
        # A byte that comes after the end makes it a reset.
        with suppress(TimeoutError):
            try:
                connection.sendall(b"X")
                assert connection.recv(100) == b""
            except (ConnectionResetError, BrokenPipeError):
                pass
            return
    pytest.fail("it was let go on")


def test_the_second_head_of_a_connection_may_begin_late_and_not_end_late(hurried, server, engine):
    connection = connect(server.port)
    connection.sendall(request())
    answer(connection)
    time.sleep(0.5)  # idle between two requests: that is what keep-alive is for
    connection.sendall(request())
    answer(connection)
    connection.sendall(HEAD)
    assert connection.recv(100) == b""


def test_an_answer_may_take_longer_than_a_head(hurried, server, engine):
    engine.stall_after_tokens = 3
    connection = connect(server.port)
    connection.sendall(request())
    assert engine.started.wait(10)
    time.sleep(0.6)
    engine.release()
    answer(connection)
    assert engine.aborted == []


def test_a_connection_too_many_is_told_to_come_again(own_server, monkeypatch, caplog):
    monkeypatch.setattr(serve, "connection_limits", lambda: (2, 8))
    server, _ = own_server()
    kept = [connect(server.port) for _ in range(2)]
    for connection in kept:
        connection.sendall(request())
        answer(connection)
    for _ in range(3):
        turned_away = connect(server.port)
        assert turned_away.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert turned_away.recv(1000) == b""
    (line,) = [
        record.message for record in caplog.records if "connections are open" in record.message
    ]
    assert line.startswith("2 connections are open")
    kept[0].sendall(request())  # those that were there go on
    answer(kept[0])
    kept[1].close()
    deadline = time.monotonic() + 10
    while True:
        connection = connect(server.port)
        connection.sendall(request())
        with suppress(AssertionError):
            answer(connection)
            break
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("open_files", "most", "backlog"),
    [
        (1024, 576, 96),
        (20_000, 15_648, 2048),
        (1 << 20, 1 << 16, 2048),
        (resource.RLIM_INFINITY, 1 << 16, 2048),
    ],
)
def test_connections_leave_files_for_the_links_to_the_engine(
    monkeypatch, open_files, most, backlog
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (open_files, open_files))
    assert connection_limits() == (most, backlog)
    if open_files != resource.RLIM_INFINITY:
        assert most + backlog < open_files


def test_a_request_with_two_lengths_is_refused_and_ends_the_connection(server, engine):
    connection = connect(server.port)
    body = request()[len(HEAD) :].partition(b"\r\n\r\n")[2]
    lengths = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(body)
    connection.sendall(HEAD + lengths + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    received = b""
    while part := connection.recv(65536):
        received += part
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"both Content-Length and Transfer-Encoding" in received
    assert engine.requests == []


def test_a_body_that_does_not_end_is_a_408(hurried, server, engine, http):
    connection = connect(server.port)
    connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
    received = b""
    while part := connection.recv(65536):  # and the connection ends
        received += part
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in received
    assert http.get("/health").status_code == 200
    assert engine.requests == []


def stream_that_nobody_reads(own_server, receive_bytes=4096, **fields):
    """A connection whose buffers fill with the beginning of a long stream."""
    server, engine = own_server(**LONG)
    engine.output = list(b"0123456789") * 4000
    connection = connect(server.port, receive_bytes)
    connection.sendall(request(stream=True, max_tokens=40_000, **fields))
    return server, engine, connection


def test_a_stream_that_nobody_reads_is_cut_off(monkeypatch, own_server, caplog):
    monkeypatch.setattr(patience, "STALL_SECONDS", 0.3)
    caplog.set_level(logging.INFO, logger="cp_shared_kv.server.access")
    _, engine, connection = stream_that_nobody_reads(own_server)
    assert engine.abort_called.wait(20)
    assert b"[DONE]" not in ended(connection)
    while '"status": 499' not in caplog.text:
        time.sleep(0.05)


def test_a_stream_that_nobody_reads_is_held_to_its_timeout(own_server):
    _, engine, connection = stream_that_nobody_reads(own_server, timeout=1.5)
    assert engine.abort_called.wait(20)  # long before the client would count as gone
    connection.close()


def test_a_slow_reader_gets_all(monkeypatch, own_server):
    # A busy machine may well pause the reader for a second.
    monkeypatch.setattr(patience, "STALL_SECONDS", 5.0)
    _, engine, connection = stream_that_nobody_reads(own_server, 1 << 18)
    received = b""
    for _ in range(12):  # longer than that in all
        time.sleep(0.5)
        received += connection.recv(1 << 18)
    assert (received + ended(connection)).count(b"data: ") == 40_001
    assert engine.aborted == []


def test_a_head_without_end_is_refused_by_its_size(server, engine):
    connection = connect(server.port)
    connection.sendall(HEAD + b"X: " + b"y" * (1 << 17))
    assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
