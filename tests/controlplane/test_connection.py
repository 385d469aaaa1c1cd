"""Connections of a web process: deadlines and bounds of headers, readers that stop, what is not HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import pytest

from controlplane import connection
from tests.controlplane.web_server import Server, error_code, let_end, read_all, request, serving


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST / HTTP/1.1\r\nHost: x\r\n", request("/", "Content-Length: 0", close=False) + b"G"],
    ids=["nothing", "half a request", "half a second request"],
)
def test_headers_that_are_not_complete_in_time_end_the_connection(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.3)
    with serving() as server, server.connect() as client:
        started = time.monotonic()
        client.sendall(sent)
        seen = read_all(client)

    assert 0.2 < time.monotonic() - started < 3
    assert seen.count(b"HTTP/1.1 200") == len(server.app.bodies)


def test_a_trickle_of_header_bytes_does_not_extend_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.4)
    with serving() as server, server.connect() as client:
        started = time.monotonic()
        client.sendall(b"POST / HTTP/1.1\r\n")
        trickle = threading.Thread(target=_trickle, args=(client,))
        trickle.start()
        trickle.join(5)

    assert not trickle.is_alive(), "The connection outlived its deadline."
    assert time.monotonic() - started < 3


def test_blank_lines_between_requests_do_not_keep_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.3)
    with serving() as server, server.connect() as client:
        client.sendall(request("/", "Content-Length: 0", close=False))
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        client.sendall(b"\r\n")
        read_all(client)

    assert time.monotonic() - started < 3


def test_a_late_half_of_a_second_request_does_not_cut_the_first_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.2)
    with serving() as server, server.connect() as client:
        client.sendall(request("/hang", "Content-Length: 0", close=False) + b"POST /")
        time.sleep(0.5)
        let_end(server)
        seen = read_all(client)

    assert seen.endswith(b"ended\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * 17_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * 17_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 4_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * 300_000,
    ],
    ids=["request line", "one header", "many headers", "endless header"],
)
def test_headers_beyond_their_bound_are_refused(data: bytes) -> None:
    with serving() as server:
        reply = server.ask(data)

    assert reply.startswith(b"HTTP/1.1 431") or reply == b""
    assert server.app.bodies == []


def test_large_headers_within_their_bound_are_served() -> None:
    with serving() as server:
        reply = server.ask(request("/", "Content-Length: 0", "a: " + "b" * 15_000))

    assert reply.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: b\r\n folded\x00\r\n\r\n",
        "GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    ],
)
def test_what_is_not_http_is_refused_and_never_smuggled(data: bytes) -> None:
    with serving() as server:
        reply = server.ask(data)

    assert reply.startswith(b"HTTP/1.1 400") or reply == b""
    assert server.app.bodies == [] or server.app.exits


def test_a_websocket_is_not_opened() -> None:
    with serving() as server:
        reply = server.ask(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )

    assert b"101" not in reply.split(b"\r\n")[0]


@pytest.mark.slow
def test_a_reader_that_stops_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_STALL_S", 0.3)
    with serving() as server, server.connect() as client:
        client.sendall(request("/flood", "Content-Length: 0"))
        client.recv(1)
        deadline = time.monotonic() + 5
        while "/flood" not in server.app.exits and time.monotonic() < deadline:
            time.sleep(0.02)
        ends = list(server.app.exits)  # before this client hangs up by itself

    assert ends == ["http.disconnect", "/flood"]


def _trickle(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client.sendall(b"a")
            time.sleep(0.05)


def test_further_connections_of_one_address_are_refused_and_one_that_ends_makes_room(
    settings: Any,
) -> None:
    settings.CONNECTIONS_PER_ADDRESS = 2
    with serving() as server:
        held = [server.connect() for _ in range(2)]
        for each in held:
            each.sendall(request("/", "Content-Length: 0", close=False))
            assert each.recv(65536).startswith(b"HTTP/1.1 200")
        body = b"x" * 300_000
        refused = server.ask(request("/", f"Content-Length: {len(body)}", body=body))
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5\r\n" in refused
        assert error_code(refused) == "too_many_connections"
        assert len(server.app.bodies) == 2, "the application hears nothing of it"
        held.pop().close()
        reply = ask_until_served(server)
        held.pop().close()

    assert reply.startswith(b"HTTP/1.1 200")
    assert not connection._open, "who has left is remembered no more"


def test_a_connection_that_never_asks_counts_too(settings: Any) -> None:
    settings.CONNECTIONS_PER_ADDRESS = 1
    with serving() as server, server.connect():
        deadline = time.monotonic() + 5
        while not connection._open and time.monotonic() < deadline:
            time.sleep(0.01)
        refused = server.ask(request("/", "Content-Length: 0"))

    assert refused.startswith(b"HTTP/1.1 503")


def test_without_a_limit_everybody_is_served(settings: Any) -> None:
    settings.CONNECTIONS_PER_ADDRESS = 0
    with serving() as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(server.connect())
        assert server.ask(request("/", "Content-Length: 0")).startswith(b"HTTP/1.1 200")


def ask_until_served(server: Server) -> bytes:
    """The answer once the server has seen that a client left."""
    deadline = time.monotonic() + 5
    while True:
        reply = server.ask(request("/", "Content-Length: 0"))
        if reply.startswith(b"HTTP/1.1 200") or time.monotonic() > deadline:
            return reply
        time.sleep(0.02)
