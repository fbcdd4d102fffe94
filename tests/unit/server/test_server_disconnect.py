"""A client that goes away, however it does, ends its request in the engine."""

from __future__ import annotations

import json
import socket
import struct
import time

import pytest


def send_request(port: int, **fields) -> socket.socket:
    body = json.dumps({"model": "fake-model", "prompt": "x", **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def reset(connection: socket.socket) -> None:
    """Close with RST, as a killed client's kernel may."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stall_after", [0, 3], ids=["before the first token", "midway"])
def test_the_engine_is_told_to_abort(server, engine, http, leave, stream, stall_after):
    engine.stall_after_tokens = stall_after
    connection = send_request(server.port, stream=stream)
    assert engine.started.wait(10)
    if stream and stall_after:
        received = b""
        while received.count(b"data: ") < stall_after:
            received += connection.recv(65536)
    leave(connection)
    assert engine.abort_called.wait(10)
    assert engine.aborted == [engine.requests[0].request_id]
    assert engine.aborted_finished is False
    engine.stall_after_tokens = None
    again = http.post("/v1/completions", json={"model": "fake-model", "prompt": "x"})
    assert again.json()["choices"][0]["text"] == "the answer"
    assert len(engine.aborted) == 1


def test_a_client_that_stops_reading_a_long_stream_and_leaves(server, engine):
    engine.output = list(b"0123456789") * 50
    engine.stall_after_tokens = 400
    connection = send_request(server.port, stream=True, max_tokens=500)
    assert engine.started.wait(10)
    time.sleep(0.2)
    connection.close()
    assert engine.abort_called.wait(10)


def test_a_client_that_leaves_while_sending_its_body_reaches_no_engine(server, engine, http):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    connection.close()
    assert http.get("/health").status_code == 200
    assert engine.requests == []


def test_a_client_that_takes_its_whole_answer_aborts_nothing(server, engine):
    connection = send_request(server.port, stream=True)
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(65536)
    connection.close()
    time.sleep(0.2)
    assert engine.aborted == []


def test_requests_left_are_counted_apart(server, engine, http):
    def left() -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if 'status="499"' in line)

    before = left()
    engine.stall_after_tokens = 1
    connection = send_request(server.port)
    assert engine.started.wait(10)
    connection.close()
    assert engine.abort_called.wait(10)
    deadline = time.monotonic() + 10
    while left() == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left() == before + 1
