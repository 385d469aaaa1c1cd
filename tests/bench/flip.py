"""How fast the way back is: a full queue on one version, and a route that leads to the other one.

``apply`` is the one call to Redis that changes the route and moves the queue; a promote or rollback adds a database
transaction to it. ``first answer`` runs from the start of that call to the first token that an application sees of the
other version, with every slot busy before and a step of 10 ms: it holds the wait for the next step. Each flip finds
``NUM_QUEUED`` requests that nobody has begun.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from inference.protocol import Resident, Route
from inference.queue import Applied, Queue
from inference.queue.lanes import LaneCount
from inference.replicas import list_slots
from tests.bench.gateway_process import Gateway, run_gateway
from tests.inference.slot_process import SlotProcess, wait_until
from tests.redis_server import RedisServer

ENDPOINT, VERSIONS = "bench", ("instant/1", "instant/2")
NUM_FLIPS = 20
NUM_QUEUED = 100
MAX_RUNNING = 8
NUM_TOKENS = 4
LONG = 2_000  # tokens of those that keep the slot busy; they are cancelled after the flip
STEP_S = 0.01
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Flip:
    """One change of route under load."""

    apply_s: float
    first_answer_s: float
    applied: Applied


def measure() -> Iterator[str]:
    """Lines of the report."""
    with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory)) as server:
        log = Path(directory, "slots.log")
        env = {
            "TATKAL_ENGINE_MAX_NUM_SEQS": str(MAX_RUNNING),
            "TATKAL_TEST_STEP_S": str(STEP_S),
        }
        with (
            Queue(server.url) as queue,
            SlotProcess(server.url, "flip-1", log, **env),
            SlotProcess(server.url, "flip-2", log, **env),
            run_gateway(server.url, Path(directory, "gateway.log")) as gateway,
        ):
            queue.publish_desired([Resident(ENDPOINT, each, "instant") for each in VERSIONS])
            queue.apply_route(_route(0))
            wait_until(lambda: _num_ready(queue) == len(VERSIONS), timeout_s=60)
            yield from _report(asyncio.run(_measure(queue, gateway)))


def _route(generation: int) -> Route:
    live, previous = VERSIONS if generation % 2 == 0 else reversed(VERSIONS)
    return Route(ENDPOINT, "bench", generation, live, previous=previous, queue_cap=1_000)


def _num_ready(queue: Queue) -> int:
    return sum(each.state == "ready" for each in list_slots(queue))


async def _measure(queue: Queue, gateway: Gateway) -> list[Flip]:
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(
        base_url=gateway.url, headers=gateway.headers, timeout=TIMEOUT_S, limits=limits
    ) as client:
        await _flip(queue, client, 1)  # connections, caches, first-use costs
        return [await _flip(queue, client, generation) for generation in range(2, NUM_FLIPS + 2)]


async def _flip(queue: Queue, client: httpx.AsyncClient, generation: int) -> Flip:
    left, target = _route(generation - 1).live, _route(generation).live
    running = [asyncio.create_task(_ask(client, LONG)) for _ in range(MAX_RUNNING)]
    await _wait_until_filled(queue, left, num_queued=0)
    waiting = [asyncio.create_task(_ask(client, NUM_TOKENS)) for _ in range(NUM_QUEUED)]
    await _wait_until_filled(queue, left, num_queued=NUM_QUEUED)
    began_at = time.perf_counter()
    applied = queue.apply_route(_route(generation))
    apply_s = time.perf_counter() - began_at
    answers = await asyncio.gather(*waiting)
    if {version for version, _ in answers} != {target}:
        raise RuntimeError(f"some of {NUM_QUEUED} requests were not moved to {target}")
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await _wait_until_free(queue)
    return Flip(apply_s, min(first_at for _, first_at in answers) - began_at, applied)


async def _ask(client: httpx.AsyncClient, num_tokens: int) -> tuple[str, float]:
    """The version that answered, and when its first token was here."""
    body = {"model": ENDPOINT, "prompt": "hello", "max_tokens": num_tokens, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        first_at = time.perf_counter()
        last = (await response.aread())[-20:]
    if not last.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"a stream ended early: {last!r}")
    return response.headers["x-model-version"], first_at


async def _wait_until_filled(queue: Queue, version: str, *, num_queued: int) -> None:
    """Return when every place of the slot is taken and ``num_queued`` requests wait."""
    wanted = LaneCount(version, num_queued, MAX_RUNNING)
    deadline = time.monotonic() + TIMEOUT_S
    while wanted not in queue.read_lanes(ENDPOINT):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{queue.read_lanes(ENDPOINT)} never was {wanted}")
        await asyncio.sleep(0.01)


async def _wait_until_free(queue: Queue) -> None:
    """Return when what was cancelled has left its slot."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(each.num_in_flight for each in queue.read_lanes(ENDPOINT)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{queue.read_lanes(ENDPOINT)} never was free")
        await asyncio.sleep(0.01)


def _report(flips: Sequence[Flip]) -> Iterator[str]:
    yield ""
    yield (
        f"Flip: {len(flips)} changes of route with {NUM_QUEUED} requests queued and {MAX_RUNNING} running, "
        f"steps of {1000 * STEP_S:.0f} ms"
    )
    yield f"  apply          {_spread([each.apply_s for each in flips])}   aim 5 ms"
    yield f"  first answer   {_spread([each.first_answer_s for each in flips])}   aim 50 ms"
    requeued = [each.applied.num_requeued for each in flips]
    in_flight = [each.applied.num_in_flight for each in flips]
    yield (
        f"  moved {min(requeued)} to {max(requeued)} each time ({sum(requeued)} in all), none lost; "
        f"{min(in_flight)} to {max(in_flight)} went on where they ran"
    )


def _spread(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"p50 {1000 * statistics.median(ordered):6.2f} ms  p99 {1000 * p99:6.2f} ms"
