"""What is left of the engine's speed through gateway, Redis and slot: 64 streams over HTTP, and the same engine bare.

Both answer the same requests on the same number of threads, and take turns. The client is this process; it parses no
JSON, so that it costs little on the cores that it shares with what it measures. Answers may end early, alike on both.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from inference.engine.llm_engine import LLMEngine
from inference.protocol import Resident, Route, SamplingParams
from inference.queue import Queue
from inference.replicas import list_slots
from tests.bench import own
from tests.bench.gateway_process import Gateway, run_gateway
from tests.bench.table import Row, ratios, render
from tests.bench.traffic import Asked
from tests.bench.weights import import_weights
from tests.bench.workload import Workload
from tests.inference.slot_process import SlotProcess, wait_until
from tests.redis_server import RedisServer

ENDPOINT, VERSION = "bench", "smollm2/1"
ENGINE = "inference.engine.llm_engine:LLMEngine.load"
READY_S = 120
ANSWER_S = 300.0
SEED = 4000


@dataclass(frozen=True, slots=True)
class Served:
    """One round: tokens a second, and processor seconds of the gateway meanwhile."""

    tokens_per_s: float
    gateway_cpu_s: float = 0.0
    wall_s: float = 0.0


def measure(*, is_quick: bool) -> Iterator[str]:
    """Lines of the report."""
    artifact = import_weights("int4")
    workload = own.sample_workload(artifact, is_quick=is_quick)
    yield "\nThe engine through HTTP"
    yield from render(measure_served(artifact, workload, is_quick=is_quick))


def measure_served(artifact: Path, workload: Workload, *, is_quick: bool) -> Iterator[Row]:
    """The rows."""
    num_threads = max(len(os.sched_getaffinity(0)) - 1, 1)
    with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory)) as server:
        log = Path(directory, "slot.log")
        env = {"TATKAL_ENGINE": ENGINE, "TATKAL_ENGINE_NUM_THREADS": str(num_threads)}
        with (
            Queue(server.url) as queue,
            SlotProcess(server.url, "bench", log, TATKAL_LEASE_MS="2000", **env) as slot,
            run_gateway(server.url, Path(directory, "gateway.log")) as gateway,
        ):
            queue.apply_route(Route(ENDPOINT, "bench", 1, VERSION, queue_cap=1_000))
            queue.publish_desired([Resident(ENDPOINT, VERSION, str(artifact))])
            _wait_until_ready(queue, slot)
            engine = own.load(artifact, num_threads)
            yield from _alternate(engine, gateway, workload, 2 if is_quick else 5)


def _wait_until_ready(queue: Queue, slot: SlotProcess) -> None:
    try:
        wait_until(
            lambda: any(each.state == "ready" for each in list_slots(queue)), timeout_s=READY_S
        )
    except TimeoutError as error:
        raise RuntimeError(f"the slot is not ready:\n{slot.read_log()[-2000:]}") from error


def _alternate(
    engine: LLMEngine, gateway: Gateway, workload: Workload, num_rounds: int
) -> Iterator[Row]:
    asyncio.run(
        _serve_round(gateway, workload.requests(SEED))
    )  # connections, caches, first-use costs
    bare, served = [], []
    for number in range(1, num_rounds + 1):
        bare.append(_run_bare(engine, workload.requests(SEED + number, text=1)))
        served.append(asyncio.run(_serve_round(gateway, workload.requests(SEED + number, text=2))))
    measured = f"{workload.num_requests} streams, tokens/s"
    rates = [each.tokens_per_s for each in served]
    share = 100 * sum(each.gateway_cpu_s for each in served) / sum(each.wall_s for each in served)
    yield Row(measured, "tatkal int4, bare engine", bare)
    yield Row(
        measured, "tatkal int4, through HTTP", rates, note=f"gateway uses {share:.0f} % of a core"
    )
    yield Row(measured, "HTTP / bare", ratios(rates, bare), ".2f", "aim 0.85")


def _run_bare(engine: LLMEngine, asked: Sequence[Asked]) -> float:
    started_at = time.perf_counter()
    for index, each in enumerate(asked):
        sampling = SamplingParams(max_tokens=each.num_tokens, temperature=0.0)
        engine.add_request(f"bare-{index}", each.prompt, sampling)
    num_tokens = 0
    while engine.has_unfinished:
        num_tokens += len(engine.step())
    return num_tokens / (time.perf_counter() - started_at)


async def _serve_round(gateway: Gateway, asked: Sequence[Asked]) -> Served:
    cpu_s, started_at = gateway.cpu_s(), time.perf_counter()
    async with asyncio.timeout(ANSWER_S):
        counts = await asyncio.gather(*(_stream(gateway, each) for each in asked))
    wall_s = time.perf_counter() - started_at
    return Served(sum(counts) / wall_s, gateway.cpu_s() - cpu_s, wall_s)


async def _stream(gateway: Gateway, asked: Asked) -> int:
    """Read one answer to its end; the number of its tokens, from the usage in its last chunk."""
    address = urlsplit(gateway.url)
    body = json.dumps(
        {
            "model": ENDPOINT,
            "prompt": list(asked.prompt),
            "max_tokens": asked.num_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {address.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in gateway.headers.items()),
    ]
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    last = b""
    while piece := await reader.read(2**16):
        last = (last + piece)[-2048:]
    writer.close()
    return _count_tokens(last)


def _count_tokens(last: bytes) -> int:
    name = b'"completion_tokens":'
    if b"data: [DONE]" not in last or name not in last:
        raise RuntimeError(f"a stream ended early: {last[-300:]!r}")
    return int(last.rpartition(name)[2].split(b",")[0].strip(b" }"))
