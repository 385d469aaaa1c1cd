"""A real uvicorn with the gateway's settings and a scripted client behind it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import httpx
import pytest
import uvicorn
from django.core.handlers.asgi import ASGIHandler
from django.test.utils import override_settings

from controlplane.asgi import App, Application
from controlplane.connection import Connection
from controlplane.gateway.runtime import Runtime, check_redis, check_slots, resources
from controlplane.health import Health
from inference.client import Client
from tests.controlplane.gateway.fakes import KEY, FakeClient

START_S = 10.0
GATEWAY_SETTINGS: dict[str, Any] = {
    "ROOT_URLCONF": "controlplane.gateway.urls",
    "MIDDLEWARE": ["controlplane.gateway.middleware.authenticate"],
    "DATA_UPLOAD_MAX_MEMORY_SIZE": 2**20,
}


@dataclass(slots=True)
class Served:
    """A gateway that listens, and the client behind it."""

    port: int
    fake: FakeClient
    server: uvicorn.Server
    runtime: Runtime

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def http(self, key: str | None = KEY) -> httpx.Client:
        """An HTTP client with a valid key, or another one, or none."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=10)

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)


@contextmanager
def serve(fake: FakeClient, **options: Any) -> Iterator[Served]:
    """Run the gateway in a thread until the block ends."""
    runtime = Runtime(cast(Client, fake), deadline_s=30.0)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[Mapping[str, Any]]:
        yield resources(runtime)

    application = Application(
        cast(App, ASGIHandler()),
        health=lambda state: Health(
            {"redis": check_redis, "slots": check_slots}, state, startup=("redis",), max_age_s=0.0
        ),
        lifespan=lifespan,
        **{name: options.pop(name) for name in ("body_timeout_s",) if name in options},
    )
    config = uvicorn.Config(
        application, port=0, http=Connection, lifespan="on", log_config=None, **options
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=_run, args=(server,), daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started, "The gateway did not start."
    try:
        yield Served(server.servers[0].sockets[0].getsockname()[1], fake, server, runtime)
    finally:
        server.should_exit = True
        thread.join(START_S)
        assert not thread.is_alive(), "The gateway did not stop."


def _run(server: uvicorn.Server) -> None:
    asyncio.run(server.serve())


@pytest.fixture
def fake() -> FakeClient:
    """A client that says Hello!"""
    return FakeClient()


@pytest.fixture
def start(fake: FakeClient) -> Iterator[Callable[..., Served]]:
    """Start gateways with options of uvicorn; they stop after the test."""
    with override_settings(**GATEWAY_SETTINGS), ExitStack() as running:
        yield lambda **options: running.enter_context(serve(fake, **options))


@pytest.fixture
def gateway(start: Callable[..., Served]) -> Served:
    """A gateway with uvicorn's defaults."""
    return start()
