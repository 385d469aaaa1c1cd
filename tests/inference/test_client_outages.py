"""What a gateway logs, and what it does not, while Redis is away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inference import client as client_module
from inference.client import Client
from tests.redis_server import RedisServer

pytestmark = pytest.mark.asyncio


async def test_an_outage_is_a_line_at_its_begin_and_one_at_its_end_in_each_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "READ_BLOCK_MS", 50)
    caplog.set_level("INFO", "inference.client")
    with RedisServer(tmp_path) as server:
        client = Client(server.url)
        await client.start()
        await _wait_for(client, is_connected=True)
        server.kill()
        await asyncio.sleep(1.5)  # the lease notices as well, and each tries again and again
        assert [_count(caplog, f"{each} waits") for each in ("frames", "lease")] == [1, 1]
        assert _count(caplog, "goes on") == 0

        server.start()
        await _wait_for(client, is_connected=True)
        await asyncio.sleep(0.5)
        await client.close()

    assert [_count(caplog, f"{each} goes on") for each in ("frames", "lease")] == [1, 1]
    assert len(caplog.records) == 4


async def _wait_for(client: Client, *, is_connected: bool) -> None:
    async with asyncio.timeout(10):
        while client.is_connected is not is_connected:
            await asyncio.sleep(0.01)


def _count(caplog: pytest.LogCaptureFixture, start: str) -> int:
    return sum(start in message for message in caplog.messages)
