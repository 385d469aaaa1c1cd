"""Broken versions registered and set as candidate beside a live one under load: each says why, and the live one never errs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults import checkpoints
from tests.faults.history import Outcome, check
from tests.faults.instance import OLD, ApiRefused, Instance
from tests.faults.load import Load
from tests.faults.operator import wait_until_drained
from tests.inference.slot_process import wait_until

MAX_REQUESTS = 16
ENV = {"TATKAL_ENGINE": "tests.faults.mixed_engine:load"}
RATE = 10.0
# A KV cache of terabytes, which the long context of the checkpoint could fill.
TOO_LARGE = {"kv_cache_bytes": 2**42, "standby_kv_bytes": 2**42}

pytestmark = pytest.mark.slow

Write = Callable[[Path], Path]


async def test_broken_directories_are_refused_with_file_and_reason(instance: Instance) -> None:
    broken = {
        "corrupt": (checkpoints.write_with_corrupt_shard, checkpoints.SHARDS[1]),
        "toothless": (checkpoints.write_without_tokenizer, "tokenizer.json"),
        "poisoned": (checkpoints.write_with_nan, "NaN"),
    }
    async with served_without_error(instance):
        versions = {name: register(instance, name, write) for name, (write, _) in broken.items()}
        states = {
            name: await asyncio.to_thread(wait_for_import, instance, version)
            for name, version in versions.items()
        }
        for version in versions.values():
            with pytest.raises(ApiRefused) as refused:
                instance.change(candidate=version)
            assert refused.value.status == 409

    assert {state["state"] for state in states.values()} == {"failed"}
    for name, (_, reason) in broken.items():
        assert reason in states[name]["state_reason"]


@pytest.mark.parametrize(
    ("name", "write", "options", "reason"),
    [
        ("overflowing", checkpoints.write_overflowing, {}, "its numbers are broken"),
        ("giant", checkpoints.write_long_context, TOO_LARGE, "are available"),
    ],
)
async def test_a_candidate_that_cannot_be_loaded_fails_alone(
    instance: Instance, name: str, write: Write, options: dict[str, int], reason: str
) -> None:
    async with served_without_error(instance):
        version = register(instance, name, write, **options)
        state = await asyncio.to_thread(wait_for_import, instance, version)
        assert state["state"] == "ready", state["state_reason"]
        instance.change(candidate=version)
        await asyncio.to_thread(wait_until_told_why, instance, version, reason)

    assert instance.endpoint()["live"] == OLD


@asynccontextmanager
async def served_without_error(instance: Instance) -> AsyncIterator[None]:
    """Load on the live version meanwhile: every answer is whole, and nothing is left."""
    async with Load(instance.run) as load:
        sending = asyncio.create_task(load.run(rate=RATE, duration_s=120.0))
        await asyncio.sleep(0.5)
        yield
        await asyncio.sleep(0.5)
        sending.cancel()
        records = await load.end()
    report = check(records, num_sent=load.num_sent, golden=instance.golden())
    assert report.is_clean, report
    assert report.counts == {Outcome.OK: load.num_sent}, report
    assert {record.version for record in records} == {OLD}
    await wait_until_drained(instance)


def register(instance: Instance, name: str, write: Write, **options: int) -> str:
    """Register what ``write`` writes below the model root; the version's name."""
    path = write(instance.home.path / "models" / name)
    body = {"model": name, "source_kind": "huggingface", "source": str(path)}
    reply = instance.call("POST", "versions", body | {"engine_options": options})
    version: str = reply["name"]
    return version


def wait_for_import(instance: Instance, version: str) -> dict[str, Any]:
    """The version when its import has ended, one way or the other."""
    seen: dict[str, Any] = {}

    def has_ended() -> bool:
        seen.update(instance.call("GET", f"versions/{version}"))
        return seen["state"] in ("ready", "failed")

    wait_until(has_ended, timeout_s=45)
    return seen


def wait_until_told_why(instance: Instance, version: str, reason: str) -> None:
    """Return when the endpoint shows why, and whoever promotes the version is told the same."""
    told = ""

    def is_told() -> bool:
        nonlocal told
        roles = instance.endpoint()["roles"]
        shown = [each["missing"] for each in roles if each["version"] == version]
        with pytest.raises(ApiRefused) as refused:
            instance.promote(version)
        assert refused.value.status == 409
        told = refused.value.response.text
        return reason in told and reason in str(shown)

    try:
        wait_until(is_told, timeout_s=30)
    except TimeoutError as error:
        raise AssertionError(f"Told was {told}") from error
