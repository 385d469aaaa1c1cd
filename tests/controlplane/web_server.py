"""A real uvicorn around a small application in Django's place, and raw requests to it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from controlplane.asgi import Application, Message, Receive, Send
from controlplane.connection import Connection
from controlplane.health import Health

Scope = MutableMapping[str, Any]


async def passes(_resources: Mapping[str, Any]) -> str:
    """A check that holds."""
    return "ok"


class App:
    """Stands where Django stands: answers with the length of the body, and notes how requests end."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.lifespan_ended = False
        self.interrupted = asyncio.Event()
        self.exits: list[str] = []
        self.path_hangs = "/hang"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        self.states.append(state)
        state["exits"].callback(self.exits.append, scope["path"])
        message = await receive()
        self.bodies.append(message["body"])
        if scope["path"] == "/broken":
            raise RuntimeError("broken")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/hang":
            await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
            await self.interrupted.wait()
            await send({"type": "http.response.body", "body": b"ended"})
        elif scope["path"] == "/flood":
            await self._flood(receive, send)
        else:
            await send({"type": "http.response.body", "body": b"%d" % len(message["body"])})

    async def _flood(self, receive: Receive, send: Send) -> None:
        async def write() -> None:
            while True:
                part: Message = {"type": "http.response.body", "body": b"x" * 65536}
                await send({**part, "more_body": True})

        writing = asyncio.create_task(write())
        message = await receive()
        self.exits.append(message["type"])
        writing.cancel()

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[Mapping[str, Any]]:
        """Offers something to requests, and a way to interrupt them."""
        yield {"resource": self, "interrupt": self.interrupted.set}
        self.lifespan_ended = True


class Server:
    """A uvicorn in a thread."""

    def __init__(self, app: App, options: dict[str, Any], limits: dict[str, Any]) -> None:
        self.app = app
        application = Application(
            app,
            health=lambda state: Health({"passes": passes}, state),
            lifespan=app.lifespan,
            **limits,
        )
        self.server = uvicorn.Server(
            uvicorn.Config(
                application, port=0, http=Connection, lifespan="on", log_config=None, **options
            )
        )
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)

    def connect(self) -> socket.socket:
        """A raw connection."""
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return socket.create_connection(("127.0.0.1", port), timeout=10)

    def ask(self, data: bytes) -> bytes:
        """All that comes back for ``data`` until the connection ends."""
        with self.connect() as client:
            client.sendall(data)
            return read_all(client)

    def stop(self) -> None:
        """As SIGTERM does."""
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive(), "The server did not stop."


@contextmanager
def serving(options: dict[str, Any] | None = None, **limits: Any) -> Iterator[Server]:
    """A server that listens until the block ends."""
    server = Server(App(), options or {}, limits)
    server.thread.start()
    deadline = time.monotonic() + 10
    while not server.server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.server.started, "The server did not start."
    try:
        yield server
    finally:
        server.stop()


def read_all(client: socket.socket) -> bytes:
    """Everything up to the end of the connection, however it ends."""
    seen = b""
    try:
        while data := client.recv(65536):
            seen += data
    except ConnectionResetError:
        pass
    return seen


def request(path: str = "/", *headers: str, body: bytes = b"", close: bool = True) -> bytes:
    """One request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    if close:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def error_code(reply: bytes) -> str:
    """The code in an error's JSON."""
    code: str = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"]
    return code


def let_end(server: Server) -> None:
    """Let the requests to ``/hang`` end."""
    loop = server.server.servers[0].get_loop()
    loop.call_soon_threadsafe(server.app.interrupted.set)


def read_until(client: socket.socket, mark: bytes) -> bytes:
    """Everything up to and with ``mark``, or to the end of the connection."""
    seen = b""
    while mark not in seen and (data := client.recv(65536)):
        seen += data
    return seen
