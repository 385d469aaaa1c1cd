"""Versions that cannot be loaded, in real processes with the real engine: each fails alone, with its reason."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from inference.client import Client
from inference.protocol import Resident
from inference.replicas import SlotStatus, list_failures
from tests.inference.slot_site import Call, Site

REAL_ENGINE = "inference.engine.llm_engine:LLMEngine.load"
OPTIONS = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}
TERABYTES = 2**37  # of positions: the table of the rotary embedding alone would fill no machine

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, *, poisoned_token: int | None = None, **shape: Any) -> Path: ...


class Caller:
    """An application that asks the live version without a pause."""

    def __init__(self, client: Client) -> None:
        self.calls: list[Call] = []
        self._client = client
        self._is_over = False
        self._task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        while not self._is_over:
            self.calls.append(Call(self._client, max_tokens=20))
            await self.calls[-1].task

    async def stop(self) -> None:
        """Let the last answer end, and have any error raised here."""
        self._is_over = True
        await self._task


@asynccontextmanager
async def asking(site: Site) -> AsyncIterator[Caller]:
    async with site.client() as client:
        caller = Caller(client)
        yield caller
        await caller.stop()


def _copy(artifact: Path, directory: Path) -> Path:
    return Path(shutil.copytree(artifact, directory / artifact.name))


def _truncate(artifact: Path) -> Path:
    weights = artifact / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    return artifact


def _resident(number: int, artifact: Path, role: str) -> Resident:
    return Resident("chat", f"small/{number}", str(artifact), OPTIONS, role)


def _statuses(site: Site, version: str) -> list[SlotStatus]:
    return [each for each in site.slots() if each.version == version]


async def test_broken_versions_fail_with_their_reasons_while_the_live_one_answers(
    site: Site, tiny_artifact: Path, write_tiny_artifact: WriteTinyArtifact, tmp_path: Path
) -> None:
    missing = _copy(tiny_artifact, tmp_path / "missing")
    (missing / "tokenizer.json").unlink()
    cases = [
        (write_tiny_artifact(poisoned_token=5), "gave no valid token 0 for a fixed prompt"),
        (_truncate(_copy(tiny_artifact, tmp_path / "truncated")), "model.safetensors: its SHA-256"),
        (missing, "tokenizer.json: the file is missing"),
        (write_tiny_artifact(context_length=TERABYTES), "MiB are available"),
    ]
    live = _resident(1, tiny_artifact, "live")
    site.publish(live)
    site.start_slot("slot-1", TATKAL_ENGINE=REAL_ENGINE)
    await site.wait_ready("slot-1")
    site.start_slot("slot-2", TATKAL_ENGINE=REAL_ENGINE)
    async with asking(site) as caller:
        for number, (artifact, reason) in enumerate(cases, 2):
            site.publish(live, _resident(number, artifact, "candidate"))

            def has_failed(version: str = f"small/{number}") -> bool:
                return any(each.state == "failed" for each in _statuses(site, version))

            await site.wait_for(has_failed, timeout_s=30)
            [status] = _statuses(site, f"small/{number}")
            assert reason in status.detail
            assert status.slot == "slot-2"
            assert status.role == "candidate"
            assert status.retry_at > 0
            [failure] = list_failures(site.queue)
            assert (failure.version, failure.count >= 1) == (f"small/{number}", True)
            assert reason in failure.detail
        site.publish(live, _resident(9, tiny_artifact, "candidate"))
        await site.wait_ready("slot-2", version="small/9")

    assert len(caller.calls) > 10
    assert all(call.rows[-1].finish is not None for call in caller.calls)
    assert {row.attempt for call in caller.calls for row in call.rows} == {1}
    [first], [second] = _statuses(site, "small/1"), _statuses(site, "small/9")
    assert (first.fingerprint, first.probe) == (second.fingerprint, second.probe)
    assert first.probe
    assert list_failures(site.queue) == []


async def test_a_version_is_loaded_once_what_it_lacked_is_there(
    site: Site, tiny_artifact: Path, tmp_path: Path
) -> None:
    artifact = _copy(tiny_artifact, tmp_path / "late")
    tokenizer = artifact / "tokenizer.json"
    text = tokenizer.read_bytes()
    tokenizer.unlink()
    site.publish(_resident(1, artifact, "live"))
    site.start_slot("slot-1", TATKAL_ENGINE=REAL_ENGINE)
    await site.wait_for(lambda: any(each.state == "failed" for each in site.slots()))

    tokenizer.write_bytes(text)

    await site.wait_ready("slot-1")
    [status] = site.slots()
    assert (status.detail, status.retry_at) == ("", 0)
    assert status.loaded_in_s > 0
    assert status.weight_bytes > 0
    assert 0 < status.kv_blocks <= status.kv_blocks_full
