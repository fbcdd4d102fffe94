"""Bodies over the limit are refused before they are read."""

from __future__ import annotations

import socket

import httpx

LIMIT = 2**20 + 32 * 1024


def test_fifty_megabytes_are_refused_with_the_limit(http, engine):
    response = http.post("/v1/completions", content=b"x" * (50 * 2**20))
    assert response.status_code == 413
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f"{LIMIT} bytes" in error["message"]
    again = http.post("/v1/completions", json={"model": "fake-model", "prompt": "x"})
    assert again.status_code == 200
    assert len(engine.requests) == 1


def test_the_answer_comes_before_the_body_is_sent(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 52428800\r\n\r\n"
        )
        assert b" 413 " in connection.recv(65536)


def test_a_client_that_sends_everything_before_it_reads_gets_the_answer_too(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 52428800\r\n\r\n"
        connection.sendall(head + b"x" * 52428800)
        received = b""
        while part := connection.recv(65536):
            received += part
    assert b" 413 " in received.splitlines()[0]
    assert received.endswith(b'"code":"body_too_large"}}')


def test_a_body_of_undeclared_length_is_refused_once_it_is_too_long(server):
    def pieces():
        for _ in range(50):
            yield b"x" * 2**20

    response = httpx.post(f"{server.url}/v1/completions", content=pieces(), timeout=20)
    assert response.status_code == 413


def test_a_body_of_exactly_the_limit_is_read(http):
    body = b'{"model": "fake-model", "prompt": "x"}'
    assert http.post("/v1/completions", content=body.ljust(LIMIT)).status_code == 200
    assert http.post("/v1/completions", content=body.ljust(LIMIT + 1)).status_code == 413
