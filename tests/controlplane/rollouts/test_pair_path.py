"""The whole way of a pair: a caller's request, its copy in a slot, two halves in Redis, one row."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from django.utils import timezone

from controlplane.gateway.exchange import Exchange
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.parameters import Kind, Origin, parse
from controlplane.monitoring.intake import intake
from controlplane.monitoring.models import RequestLog
from controlplane.rollouts.intake import intake_answers
from controlplane.rollouts.pairs import Pair
from inference.client import Client
from inference.protocol import Route
from tests.inference.engine.copy_bench import CopyBench
from tests.inference.slot_process import wait_until

pytestmark = pytest.mark.django_db

NAMES = [f"{number:032x}" for number in range(5)]


@pytest.fixture
def bench(redis_url: str) -> Iterator[CopyBench]:
    """Every request of the endpoint is answered by its live version a second time."""
    bench = CopyBench(redis_url)
    bench.queue.apply_route(
        Route("chat", "a", 3, live="small/1", rollout="ro", self_bp=10_000, store_texts=True)
    )
    bench.start_instant(step_s=0.001, voice="small")
    yield bench
    bench.stop()
    bench.queue.close()
    bench.redis.close()


async def ask(url: str) -> list[str]:
    """What callers are answered."""
    client = Client(url)
    await client.start()
    try:
        return [await _ask(client, name) for name in NAMES]
    finally:
        await client.close()


async def _ask(client: Client, name: str) -> str:
    body = {
        "model": "chat",
        "prompt": f"What is the name of {name}?",
        "metadata": {"topic": "names"},
    }
    call = parse(Kind.COMPLETION, json.dumps(body).encode(), Origin(name, "k1", 30.0))
    exchange = Exchange(client, GatewayMetrics(), call, started=0.0)
    texts = []
    try:
        await exchange.open()
        while (delta := await exchange.read()) is not None:
            texts += [piece.text for piece in delta.pieces]
            if delta.finished is not None:
                break
    finally:
        await exchange.close()
    return "".join(texts)


def test_what_a_caller_was_answered_and_its_copy_become_a_pair(
    bench: CopyBench, redis_url: str
) -> None:
    texts = asyncio.run(ask(redis_url))
    wait_until(lambda: bench.redis.xlen("answers") == 2 * len(NAMES))

    assert intake_answers(queue=bench.queue, now=timezone.now()) == len(NAMES)

    pairs = {pair.request_id: pair for pair in Pair.objects.of_rollout("ro").of_arm("self")}
    assert [pairs[name].incumbent_text for name in NAMES] == texts
    assert [pairs[name].candidate_text for name in NAMES] == texts
    assert Pair.objects.difference_rate() == (0, len(NAMES))
    assert {pair.state for pair in pairs.values()} == {"compared"}
    assert pairs[NAMES[0]].segments == {
        "lang": "en",
        "length_band": "under 200",
        "tags.topic": "names",
        "topic": "names",
    }
    assert {
        (pair.incumbent_fingerprint, pair.candidate_fingerprint) for pair in pairs.values()
    } == {("instant", "instant")}
    assert intake(queue=bench.queue, now=timezone.now()) == len(NAMES)
    assert {row.arm for row in RequestLog.objects.all()} == {"live"}
    assert bench.queue.read_skips("chat", "ro") == {}
