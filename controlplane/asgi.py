"""ASGI entry of both web processes; the settings module tells them apart.

Django's handler is wrapped in what it lacks: lifespan, a request id on every reply, bounds on bodies before they are
buffered, counters, and an end of the process that cuts no answer short without a word.

    uvicorn controlplane.asgi:application --http controlplane.connection:Connection --timeout-graceful-shutdown 30
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from http import HTTPStatus
from typing import Any, cast

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.utils.module_loading import import_string

from controlplane.health import Health
from controlplane.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Lifespan = Callable[[], AbstractAsyncContextManager[Mapping[str, Any]]]

MAX_BODY_BYTES = 2**20
BODY_TIMEOUT_S = 30.0
INTERRUPT_S = 1.0
"""How long an answer has to end with an error after the server's grace is over."""
DRAIN_S = 2.0
LINGER_S = 2.0
LINGER_BYTES = 8 * 2**20
CLIENT_CLOSED_REQUEST = 499

logger = logging.getLogger(__name__)


class BodyRefused(Exception):
    """A body that is too large, too slow, or gone; ``status`` None where nobody is left to be told."""

    def __init__(self, status: HTTPStatus | None, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class Application:
    """Django under an ASGI server.

    ``lifespan`` yields what the process holds; each request finds it in ``scope["state"]``, beside:

    - ``request_id``: made here, never taken from the caller, sent back as ``x-request-id``;
    - ``exits``: an ``AsyncExitStack`` that is unwound when the request is over, however it ends;
    - ``health`` and ``metrics`` of the process.

    A view may set ``state["endpoint"]`` to the name of an existing endpoint, which labels its metrics. A lifespan may
    yield ``interrupt``, called when the server's grace is over and answers must end now.
    """

    def __init__(
        self,
        django: App,
        *,
        health: Callable[[Mapping[str, Any]], Health],
        lifespan: Lifespan,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._django = django
        self._make_health = health
        self._lifespan = lifespan
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._open: set[asyncio.Task[None]] = set()
        self._interrupt: Callable[[], None] = _do_nothing

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one scope: the process's lifespan, or one request."""
        if scope["type"] == "lifespan":
            await self._live(scope["state"], receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            raise ValueError(f"ASGI scope type {scope['type']!r} is not served.")

    async def _live(self, state: dict[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        phase = "startup"
        try:
            async with self._lifespan() as resources:
                state.update(resources)
                state.setdefault("metrics", Metrics())
                state["health"] = self._make_health(state)
                self._interrupt = state.get("interrupt", _do_nothing)
                await send({"type": "lifespan.startup.complete"})
                await receive()
                phase = "shutdown"
                await self._drain()
        except BaseException as error:
            await send({"type": f"lifespan.{phase}.failed", "message": type(error).__name__})
            raise
        await send({"type": "lifespan.shutdown.complete"})

    async def _drain(self) -> None:
        if self._open:
            await asyncio.wait(self._open, timeout=DRAIN_S)

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        state = scope["state"]
        state["request_id"] = uuid.uuid4().hex
        metrics: Metrics = state["metrics"]
        reply = _Reply(send, state["request_id"])
        started = time.monotonic()
        metrics.in_flight.inc()
        try:
            async with AsyncExitStack() as exits:
                state["exits"] = exits
                await self._answer(scope, receive, reply)
        finally:
            endpoint = state.get("endpoint", "")
            metrics.in_flight.dec()
            metrics.requests.labels(endpoint, reply.status).inc()
            metrics.duration.labels(endpoint).observe(time.monotonic() - started)

    async def _answer(
        self, scope: MutableMapping[str, Any], receive: Receive, reply: _Reply
    ) -> None:
        incoming = _Body(receive)
        try:
            body = await self._read_body(scope, incoming)
        except BodyRefused as refusal:
            if refusal.status is not None:
                await _refuse(refusal, reply, incoming)
            return
        task = asyncio.ensure_future(self._django(scope, _replay(body, receive), reply.send))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # The server cancels what still runs when its grace is over. Django would orphan the view, and the client
            # would see a cut; so the answer is told to end with an error, and the connection stays until it has.
            self._interrupt()
            await asyncio.wait({task}, timeout=INTERRUPT_S)
            if not task.done():
                task.cancel()
                raise

    async def _read_body(self, scope: MutableMapping[str, Any], incoming: _Body) -> bytes:
        if _declared_length(scope) > self._max_body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout_s):
                async for part in incoming.parts():
                    size += len(part)
                    if size > self._max_body_bytes:
                        raise self._too_large()
                    parts.append(part)
        except TimeoutError as error:
            raise BodyRefused(
                HTTPStatus.REQUEST_TIMEOUT,
                "request_timeout",
                f"The request body was not complete within {self._body_timeout_s:g} s.",
            ) from error
        return b"".join(parts)

    def _too_large(self) -> BodyRefused:
        return BodyRefused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "request_too_large",
            f"The request body is larger than {self._max_body_bytes} bytes; send less.",
        )


class _Reply:
    """The way back to the client: adds the request id, and remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode("ascii")
        self.status = CLIENT_CLOSED_REQUEST

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._request_id)]
        await self._send(message)


class _Body:
    """The body of a request, part by part as it comes in."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_complete = False

    async def parts(self) -> AsyncIterator[bytes]:
        while not self.is_complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise BodyRefused(
                    None, "client_left", "The client left before its body was complete."
                )
            self.is_complete = not message.get("more_body", False)
            yield message.get("body", b"")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the whole body at once, and then what the server says: the disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _refuse(refusal: BodyRefused, reply: _Reply, incoming: _Body) -> None:
    """Answer without having read the body.

    A socket that is closed with unread input resets the connection, and a client that is still sending would lose the
    answer. So it is given a moment to finish before the connection closes.
    """
    status = HTTPStatus(refusal.status or HTTPStatus.BAD_REQUEST)
    error = {
        "message": refusal.message,
        "type": "invalid_request_error",
        "param": None,
        "code": refusal.code,
    }
    content = json.dumps({"error": error}).encode("ascii")
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode("ascii")),
        (b"connection", b"close"),
    ]
    await reply.send({"type": "http.response.start", "status": status.value, "headers": headers})
    await reply.send({"type": "http.response.body", "body": content, "more_body": True})
    with contextlib.suppress(TimeoutError, BodyRefused):
        async with asyncio.timeout(LINGER_S):
            left = LINGER_BYTES
            async for part in incoming.parts():
                left -= len(part)
                if left < 0:
                    break
    await reply.send({"type": "http.response.body", "body": b""})


def _declared_length(scope: MutableMapping[str, Any]) -> int:
    """The content length, or 0 where there is none; the server has refused what is no number."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)
    return 0


def _do_nothing() -> None:
    return


@contextlib.asynccontextmanager
async def no_resources() -> AsyncIterator[Mapping[str, Any]]:
    """The lifespan of a process that holds nothing."""
    yield {}


def build() -> Application:
    """The application that the settings name; a process without ``HEALTH_CHECKS`` does not start."""
    django = cast(App, get_asgi_application())
    checks = {
        name: import_string(place) for name, place in getattr(settings, "HEALTH_CHECKS", {}).items()
    }
    startup = getattr(settings, "STARTUP_CHECKS", ())
    lifespan = getattr(settings, "LIFESPAN", "")
    return Application(
        django,
        health=lambda state: Health(checks, state, startup=startup),
        lifespan=import_string(lifespan) if lifespan else no_resources,
        max_body_bytes=getattr(settings, "MAX_BODY_BYTES", MAX_BODY_BYTES),
    )


application = build()
