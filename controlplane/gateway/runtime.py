"""What one gateway process holds, from its start to its end, and when it is ready."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.core.signals import request_finished, request_started
from django.db import close_old_connections, reset_queries

from controlplane.access.cache import Caller, KeyCache
from controlplane.gateway.exchange import Exchange
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.parameters import Call
from controlplane.health import NotReady
from inference.client import Client, QueueUnavailable


@dataclass(slots=True)
class Runtime:
    """The client to the engines, the keys, the counters, and the open exchanges of one process."""

    client: Client
    deadline_s: float
    keys: KeyCache = field(init=False)
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    exchanges: set[Exchange] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.keys = KeyCache(self.client.read_key)
        self.metrics.watch(self.client)

    def exchange(self, call: Call, exits: AsyncExitStack) -> Exchange:
        """A new exchange that is closed when ``exits`` unwinds, so that no way out of a request misses it."""
        exchange = Exchange(self.client, self.metrics, call, started=time.monotonic())
        self.exchanges.add(exchange)
        exits.callback(self.exchanges.discard, exchange)
        exits.push_async_callback(exchange.close)
        return exchange

    def interrupt(self) -> None:
        """End every open exchange with a visible error: the process must go."""
        for exchange in self.exchanges:
            exchange.interrupt()


@dataclass(frozen=True, slots=True)
class Visit:
    """What a view needs of the process and of its request; see ``controlplane.asgi.Application``."""

    runtime: Runtime
    request_id: str
    exits: AsyncExitStack
    state: dict[str, Any]

    @property
    def caller(self) -> Caller:
        """Who sent the request, as the middleware found."""
        caller: Caller = self.state["caller"]
        return caller


def visit(request: ASGIRequest) -> Visit:
    """The process and the request behind ``request``."""
    state = request.scope["state"]
    return Visit(state["gateway"], state["request_id"], state["exits"], state)


def resources(runtime: Runtime) -> dict[str, Any]:
    """The lifespan state of a gateway process."""
    return {"gateway": runtime, "metrics": runtime.metrics, "interrupt": runtime.interrupt}


@asynccontextmanager
async def lifespan() -> AsyncIterator[Mapping[str, Any]]:
    """Connect to the engines for as long as the process lives."""
    _leave_databases_alone()
    deadline_s: float = settings.REQUEST_DEADLINE_S  # type: ignore[misc]  # settings.gateway has it
    client = Client(settings.REDIS_URL)
    await client.start()
    try:
        yield resources(Runtime(client, deadline_s=deadline_s))
    finally:
        await client.close()


def _leave_databases_alone() -> None:
    """Stop Django from tidying up database connections around every request.

    There are none, and each of its sync receivers costs a thread hop: without them a chat completion took 1.1 ms of CPU
    instead of 1.4 (uvicorn, one connection, a scripted client in place of Redis).
    """
    request_started.disconnect(reset_queries)
    request_started.disconnect(close_old_connections)
    request_finished.disconnect(close_old_connections)


async def check_redis(state: Mapping[str, Any]) -> str:
    """Redis answers."""
    runtime: Runtime = state["gateway"]
    try:
        names = await runtime.client.endpoints()
    except QueueUnavailable as error:
        raise NotReady("Redis does not answer.") from error
    return f"{len(names)} endpoints"


async def check_slots(state: Mapping[str, Any]) -> str:
    """At least one endpoint has a route whose live version has a ready slot."""
    runtime: Runtime = state["gateway"]
    try:
        ready = await runtime.client.ready_endpoints()
    except QueueUnavailable as error:
        raise NotReady("Redis does not answer.") from error
    if not ready:
        raise NotReady("No endpoint has a ready engine slot.")
    return f"ready: {', '.join(sorted(ready))}"
