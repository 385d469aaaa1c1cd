"""What is recorded of a request, however it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from controlplane.gateway.exchange import Exchange, RequestFailed
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.parameters import Kind, Origin, parse
from inference.client import Client, UnknownEndpoint
from inference.protocol import Finished, FinishReason, TokenRow
from tests.controlplane.gateway.conftest import Served
from tests.controlplane.gateway.fakes import (
    ENDPOINT,
    HANG,
    VERSION,
    FakeClient,
    text_row,
)

CHAT: dict[str, Any] = {"model": ENDPOINT, "messages": [{"role": "user", "content": "Hi"}]}
PROMPT: dict[str, Any] = {"model": ENDPOINT, "prompt": "Once"}


@pytest.fixture
def begin(fake: FakeClient) -> Callable[[], Exchange]:
    """Makes exchanges with the scripted client."""
    call = parse(Kind.COMPLETION, json.dumps(PROMPT).encode(), Origin("r1", "k1", 30.0))
    return lambda: Exchange(cast(Client, fake), GatewayMetrics(), call, started=0.0)


def test_a_record_tells_an_answer_whole(gateway: Served) -> None:
    body = {**CHAT, "user": "u", "metadata": {"a": "b"}}
    with gateway.http() as client:
        client.post("/v1/chat/completions", json=body)

    record = gateway.fake.wait_for_records()[0]
    assert (record.endpoint, record.version, record.generation) == (ENDPOINT, VERSION, 42)
    assert (record.outcome, record.status, record.finish_reason) == ("ok", 200, "stop")
    assert (record.prompt_tokens, record.completion_tokens) == (7, 3)
    assert (record.key_id, record.user, dict(record.tags)) == ("tests1", "u", {"a": "b"})
    assert record.first_token_s is not None
    assert 0 < record.first_token_s <= record.total_s < 5
    assert record.queue_s == 0.001
    assert (record.prompt, record.completion) == (None, None)


def test_a_record_tells_what_the_answer_took_of_the_engine(gateway: Served) -> None:
    finish = Finished(FinishReason.STOP, 7, 1, 0.001, 0.002, 0.003, engine_s=0.25, cached_tokens=4)
    gateway.fake.script = [[TokenRow("r", 1, 0, "Hi", finish=finish)]]
    with gateway.http() as client:
        client.post("/v1/completions", json=PROMPT)

    record = gateway.fake.wait_for_records()[0]
    assert (record.engine_s, record.cached_tokens) == (0.25, 4)


@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_recorded_only_where_the_endpoint_stores_them(
    gateway: Served, stream: bool
) -> None:
    gateway.fake.store_texts = True
    with gateway.http() as client:
        client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        client.post("/v1/completions", json={**PROMPT, "stream": stream})

    chat, completion = gateway.fake.wait_for_records(2)
    assert json.loads(chat.prompt or "") == [{"role": "user", "content": "Hi"}]
    assert (completion.prompt, completion.completion) == ("Once", "Hello!")
    assert chat.completion == "Hello!"


async def test_an_exchange_that_was_never_read_is_cancelled_and_recorded_once(
    fake: FakeClient, begin: Callable[[], Exchange]
) -> None:
    exchange = begin()
    await exchange.open()
    await exchange.close()
    await exchange.close()

    assert len(fake.left_at) == 1
    assert [record.outcome for record in fake.records] == ["cancelled"]


async def test_an_invented_endpoint_leaves_no_record(
    fake: FakeClient, begin: Callable[[], Exchange]
) -> None:
    fake.refusals = [UnknownEndpoint(ENDPOINT)]
    exchange = begin()
    with pytest.raises(RequestFailed):
        await exchange.open()
    await exchange.close()

    assert fake.records == []
    assert not exchange.is_known_endpoint


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_an_interrupt_ends_a_wait_at_once_and_the_next_read(
    fake: FakeClient, begin: Callable[[], Exchange], is_waiting: bool
) -> None:
    fake.script = [[text_row(0, "a")], HANG]
    exchange = begin()
    await exchange.open()
    await exchange.read()
    if is_waiting:
        asyncio.get_running_loop().call_later(0.01, exchange.interrupt)
    else:
        exchange.interrupt()

    async with asyncio.timeout(5):
        with pytest.raises(RequestFailed) as failed:
            await exchange.read(60.0)
    await exchange.close()

    assert (failed.value.code, failed.value.retry_after_s) == ("server_shutting_down", 1)
    assert fake.records[0].outcome == "server_shutting_down"


async def test_rows_that_come_after_a_wait_ran_out_are_not_lost(
    fake: FakeClient, begin: Callable[[], Exchange]
) -> None:
    fake.script = [0.05, [text_row(0, "a")], HANG]
    exchange = begin()
    await exchange.open()
    deltas = [await exchange.read(0.01)]
    while deltas[-1] is None:
        deltas.append(await exchange.read(0.01))
    await exchange.close()

    assert len(deltas) > 2
    assert [piece.text for piece in deltas[-1].pieces] == ["a"]
