"""One HTTP connection of a web process: uvicorn's protocol, with the deadlines and bounds that it lacks.

uvicorn (0.54) limits how long a connection may idle between requests, and nothing else: a client that sends a header
byte an hour, endless headers, or never reads its answer holds a connection and all behind it for ever. Start it with
``--http controlplane.connection:Connection``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio import Transport
from asyncio.events import TimerHandle
from collections import Counter
from http import HTTPStatus
from typing import Any

from django.conf import settings
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEADER_TIMEOUT_S = 10.0
MAX_HEADER_BYTES = 16 * 1024
WRITE_STALL_S = 30.0
CROWD_RETRY_S = 5
CROWD_LINGER_S = 1.0

# Of this process: how many connections each client address has open.
_open: Counter[str] = Counter()


class HeadersTooLarge(Exception):
    """Raised inside a parser callback; the parser turns it into uvicorn's 400 path."""


class Connection(HttpToolsProtocol):
    """A connection whose headers are complete within 10 s, and whose client keeps reading.

    - From the connection, or from the first byte of a further request, headers have ``HEADER_TIMEOUT_S``.
    - Request line and headers have ``MAX_HEADER_BYTES`` together, else 431.
    - While output waits above the transport's high-water mark for ``WRITE_STALL_S``, nobody reads: the connection is
      aborted, the application sees ``http.disconnect``, and cancels.
    - Of one client address ``settings.CONNECTIONS_PER_ADDRESS`` connections are served; requests of further ones are
      answered 503 before their body is read.
    - WebSockets are refused: no page or API here speaks them.
    """

    _address = ""
    _header_timer: TimerHandle | None = None
    _write_timer: TimerHandle | None = None
    _header_bytes = 0
    _in_headers = True
    _status = HTTPStatus.BAD_REQUEST

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Start the clock of the first request's headers, and see whether its client has too many already."""
        super().connection_made(transport)
        self._start_header_timer()
        self._address = _address_of(transport)
        if self._address:
            _open[self._address] += 1
            if 0 < settings.CONNECTIONS_PER_ADDRESS < _open[self._address]:
                self.app = _refuse_crowd

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        self._stop_header_timer()
        self._stop_write_timer()
        if self._address:
            _open[self._address] -= 1
            if not _open[self._address]:
                del _open[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count what belongs to headers that are not complete yet."""
        if self._in_headers:
            self._start_header_timer()
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES and not self._is_closing():
            self._refuse_headers()

    def on_message_begin(self) -> None:
        """A further request begins; uvicorn's keep-alive clock has stopped, so ours starts."""
        self._in_headers = True
        self._start_header_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop the clock, and hand the request on if its headers are within bounds."""
        self._stop_header_timer()
        self._in_headers = False
        self._header_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise HeadersTooLarge
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What follows belongs to the headers of a further request."""
        super().on_message_complete()
        self._in_headers = True

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or too large, in JSON like every other error."""
        if self.cycle is not None and not self.cycle.response_complete:
            # A further request is broken before the earlier one is answered: this is not its answer.
            self.transport.close()
            return
        if self._status == HTTPStatus.BAD_REQUEST:
            body = _error_body("bad_request", msg)
        else:
            body = _error_body("headers_too_large", "Request line and headers are too large.")
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[self._status] + head % len(body) + body)
        self.transport.close()

    def pause_writing(self) -> None:
        """Output waits for the client; give it ``WRITE_STALL_S``."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_STALL_S, self._abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        self._stop_write_timer()
        super().resume_writing()

    def _should_upgrade_to_ws(self) -> bool:
        return False

    def _is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._end_headers)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _end_headers(self) -> None:
        self._header_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = (
                False  # An answer is under way: it goes out whole, and nothing after it.
            )
        elif not self._is_closing():
            self.transport.close()

    def _refuse_headers(self) -> None:
        self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        self.send_400_response("")

    def _abort(self) -> None:
        self._write_timer = None
        self.transport.abort()


def _address_of(transport: Transport) -> str:
    """The client's address without its port; empty for a socket that has none."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


async def _refuse_crowd(_scope: Any, receive: Any, send: Any) -> None:
    """In the application's place: say that the client has too many connections, and end this one."""
    body = _error_body(
        "too_many_connections",
        f"This address has {settings.CONNECTIONS_PER_ADDRESS} connections open here, which is the most; use those, or "
        "close some.",
    )
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"retry-after", b"%d" % CROWD_RETRY_S),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    # Closed with unread input, the connection would be reset, and the answer lost on its way.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CROWD_LINGER_S):
            while (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b""})


def _error_body(code: str, message: str) -> bytes:
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": code,
    }
    return json.dumps({"error": error}).encode("ascii")
