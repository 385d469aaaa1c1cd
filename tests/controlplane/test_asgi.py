"""What surrounds Django in a web process: bounds of bodies, request ids, start and end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from controlplane import asgi
from controlplane.asgi import Application
from controlplane.health import Health
from tests.controlplane.web_server import (
    App,
    error_code,
    let_end,
    passes,
    read_all,
    read_until,
    request,
    serving,
)


def test_a_body_within_the_limit_reaches_django_whole() -> None:
    body = b"x" * 1000
    with serving(max_body_bytes=1000) as server:
        sized = server.ask(request("/", "Content-Length: 1000", body=body))
        chunked = server.ask(
            request(
                "/",
                "Transfer-Encoding: chunked",
                body=b"1f4\r\n" + body[:500] + b"\r\n1f4\r\n" + body[500:] + b"\r\n0\r\n\r\n",
            )
        )

    assert sized.endswith(b"1000\r\n0\r\n\r\n")
    assert chunked.endswith(b"1000\r\n0\r\n\r\n")
    assert server.app.bodies == [body, body]


def test_a_declared_length_above_the_limit_is_refused_before_a_byte_is_sent() -> None:
    with serving(max_body_bytes=1000) as server, server.connect() as client:
        client.sendall(request("/", "Content-Length: 1001", "Expect: 100-continue"))
        reply = read_until(client, b"}}")

    assert reply.startswith(b"HTTP/1.1 413")
    assert error_code(reply) == "request_too_large"
    assert b"x-request-id: " in reply
    assert server.app.bodies == []


@pytest.mark.parametrize("num_bytes", [1001, 200_000, 3_000_000])
def test_a_chunked_body_is_refused_while_it_is_read(num_bytes: int) -> None:
    with serving(max_body_bytes=1000) as server:
        head = request("/", "Transfer-Encoding: chunked")
        reply = server.ask(head + b"%x\r\n" % num_bytes + b"x" * num_bytes + b"\r\n0\r\n\r\n")

    assert reply.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in reply
    assert server.app.bodies == []


def test_a_sender_that_has_not_finished_may_finish_and_then_reads_the_refusal() -> None:
    part = b"x" * 100_000
    with serving(max_body_bytes=1000) as server, server.connect() as client:
        client.sendall(request("/", f"Content-Length: {5 * len(part)}"))
        for _ in range(5):
            client.sendall(part)
            time.sleep(0.05)
        reply = read_all(client)

    assert error_code(reply) == "request_too_large"


def test_a_body_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "LINGER_S", 0.1)
    with serving(body_timeout_s=0.2) as server:
        started = time.monotonic()
        reply = server.ask(request("/", "Content-Length: 10", body=b"x"))

    assert reply.startswith(b"HTTP/1.1 408")
    assert error_code(reply) == "request_timeout"
    assert time.monotonic() - started < 3
    assert server.app.bodies == []


def test_a_client_that_leaves_while_it_sends_reaches_nobody() -> None:
    with serving() as server:
        with server.connect() as client:
            client.sendall(request("/", "Content-Length: 10", body=b"x"))
        assert server.ask(request("/", "Content-Length: 0")).startswith(b"HTTP/1.1 200")

    assert server.app.bodies == [b""]


def test_a_request_finds_what_the_process_holds_and_an_id_of_its_own() -> None:
    with serving() as server:
        replies = [server.ask(request("/", "Content-Length: 0")) for _ in range(2)]

    ids = [state["request_id"] for state in server.app.states]
    assert len(set(ids)) == 2
    for request_id, reply in zip(ids, replies, strict=True):
        assert f"x-request-id: {request_id}".encode() in reply
    assert server.app.states[0]["resource"] is server.app
    assert server.app.exits == ["/", "/"]
    assert server.app.lifespan_ended


def test_exits_are_unwound_and_the_request_counted_when_django_breaks() -> None:
    with serving() as server:
        reply = server.ask(request("/broken", "Content-Length: 0"))
        metrics = server.app.states[0]["metrics"]

    assert reply.startswith(b"HTTP/1.1 500")
    assert server.app.exits == ["/broken"]
    assert "tatkal_http_requests_in_flight 0.0" in metrics.render()[0].decode()


def test_an_answer_under_way_is_finished_when_the_server_stops() -> None:
    with serving() as server, server.connect() as client:
        client.sendall(request("/hang", "Content-Length: 0"))
        assert b"begun" in read_until(client, b"begun")
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        time.sleep(0.3)
        assert stopping.is_alive()
        let_end(server)
        seen = read_all(client)
        stopping.join(10)

    assert seen.endswith(b"ended\r\n0\r\n\r\n")
    assert server.app.lifespan_ended


@pytest.mark.slow
def test_an_answer_that_outlasts_the_grace_is_told_to_end_and_ends_whole() -> None:
    with serving({"timeout_graceful_shutdown": 1}) as server, server.connect() as client:
        client.sendall(request("/hang", "Content-Length: 0"))
        read_until(client, b"begun")
        server.stop()
        seen = read_all(client)

    assert seen.endswith(b"ended\r\n0\r\n\r\n")
    assert server.app.lifespan_ended
    assert server.app.exits == ["/hang"]


def test_a_start_that_fails_ends_the_process() -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[Mapping[str, Any]]:
        raise OSError("no network")
        yield {}

    application = Application(
        App(), health=lambda state: Health({"passes": passes}, state), lifespan=lifespan
    )
    config = uvicorn.Config(application, port=0, lifespan="on", log_config=None)

    with pytest.raises(SystemExit):
        asyncio.run(uvicorn.Server(config).serve())
