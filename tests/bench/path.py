"""What gateway, Redis and slot add to a request: an engine that answers at once, so that only the path is left.

``added`` is the time of a request of one token minus the median time of ``/livez`` on the same gateway by the same
client in the same seconds, which is what HTTP alone costs. Arrivals are a Poisson process of the stated rate (an open
loop), so that a slow answer does not slow the next request down.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from inference.protocol import Resident, Route
from inference.queue import Queue
from inference.replicas import list_slots
from tests.bench.gateway_process import Gateway, run_gateway
from tests.inference.slot_process import SlotProcess, wait_until
from tests.redis_server import RedisServer

ENDPOINT, VERSION = "bench", "instant/1"
RATES = {1: 10, 10: 100, 100: 800}  # requests per second: how many requests
NUM_CAPACITY_REQUESTS = 2_000
CAPACITY_CONCURRENCY = 32
TIMEOUT_S = 30.0


def measure() -> Iterator[str]:
    """Lines of the report."""
    with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory)) as server:
        _publish(server.url)
        log = Path(directory, "slot.log")
        with (
            SlotProcess(server.url, "bench", log, TATKAL_ENGINE_MAX_NUM_SEQS="256") as slot,
            run_gateway(server.url, Path(directory, "gateway.log")) as gateway,
        ):
            _wait_until_ready(server.url, slot)
            yield from asyncio.run(_measure(gateway))


def _publish(redis_url: str) -> None:
    with Queue(redis_url) as queue:
        queue.apply_route(Route(ENDPOINT, "bench", 1, VERSION, queue_cap=1_000))
        queue.publish_desired([Resident(ENDPOINT, VERSION, "instant")])


def _wait_until_ready(redis_url: str, slot: SlotProcess) -> None:
    with Queue(redis_url) as queue:
        try:
            wait_until(
                lambda: any(each.state == "ready" for each in list_slots(queue)), timeout_s=60
            )
        except TimeoutError as error:
            raise RuntimeError(f"the slot is not ready:\n{slot.read_log()[-2000:]}") from error


async def _measure(gateway: Gateway) -> list[str]:
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    async with httpx.AsyncClient(
        base_url=gateway.url, headers=gateway.headers, timeout=TIMEOUT_S, limits=limits
    ) as client:
        await _load(client, rate=50, num_requests=50)  # connections, caches, first-use costs
        lines = [
            "",
            "Path: one request of one token through gateway, Redis and slot; instant engine",
        ]
        for rate, num_requests in RATES.items():
            lines.append(await _measure_rate(client, rate, num_requests))
        lines.append(await _measure_capacity(client, gateway, num_tokens=1, stream=False))
        lines.append(await _measure_capacity(client, gateway, num_tokens=16, stream=True))
    return lines


async def _measure_rate(client: httpx.AsyncClient, rate: int, num_requests: int) -> str:
    bare = statistics.median([await _time_livez(client) for _ in range(50)])
    total = await _load(client, rate, num_requests)
    return (
        f"  {rate:>4} requests/s   added p50 {_ms(_quantile(total, 0.5) - bare)}  "
        f"p99 {_ms(_quantile(total, 0.99) - bare)}   ({num_requests} requests; bare HTTP {_ms(bare)})"
    )


async def _measure_capacity(
    client: httpx.AsyncClient, gateway: Gateway, *, num_tokens: int, stream: bool
) -> str:
    gate = asyncio.Semaphore(CAPACITY_CONCURRENCY)
    cpu_s, started_at = gateway.cpu_s(), time.perf_counter()

    async def one() -> None:
        async with gate:
            await _complete(client, num_tokens=num_tokens, stream=stream)

    await asyncio.gather(*(one() for _ in range(NUM_CAPACITY_REQUESTS)))
    wall_s, cpu_s = time.perf_counter() - started_at, gateway.cpu_s() - cpu_s
    kind = f"{num_tokens} tokens, streamed" if stream else f"{num_tokens} token, not streamed"
    return (
        f"  {NUM_CAPACITY_REQUESTS / cpu_s:>6.0f} requests/s per gateway core   ({kind}; "
        f"{1000 * cpu_s / NUM_CAPACITY_REQUESTS:.2f} ms of gateway CPU each; "
        f"{NUM_CAPACITY_REQUESTS / wall_s:.0f}/s with client, Redis and slot on the same machine)"
    )


async def _load(client: httpx.AsyncClient, rate: int, num_requests: int) -> list[float]:
    arrivals = random.Random(rate)  # noqa: S311  # a load, no secret
    started_at = time.perf_counter()
    due_s = 0.0
    tasks = []
    for _ in range(num_requests):
        due_s += arrivals.expovariate(rate)
        await asyncio.sleep(max(0.0, started_at + due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(_complete(client, num_tokens=1, stream=False)))
    return list(await asyncio.gather(*tasks))


async def _complete(client: httpx.AsyncClient, *, num_tokens: int, stream: bool) -> float:
    body = {"model": ENDPOINT, "prompt": "hello", "max_tokens": num_tokens, "stream": stream}
    sent_at = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    took_s = time.perf_counter() - sent_at
    response.raise_for_status()
    if stream and not response.text.endswith("data: [DONE]\n\n"):
        raise RuntimeError(f"a stream ended early: {response.text[-200:]!r}")
    return took_s


async def _time_livez(client: httpx.AsyncClient) -> float:
    sent_at = time.perf_counter()
    (await client.get("/livez")).raise_for_status()
    return time.perf_counter() - sent_at


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:6.2f} ms"
