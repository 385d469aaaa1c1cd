"""Broken versions registered and set as candidate beside a live one under load: each says why, and the live one never errs."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inference.queue import Queue
from inference.replicas import list_slots
from tests.faults import checkpoints
from tests.faults.history import Outcome, check
from tests.faults.instance import OLD, ApiRefused, Instance
from tests.faults.load import Load
from tests.faults.operator import wait_until_drained
from tests.faults.states import slot_of
from tests.flows.rollouts import Office, RolloutRun, open_office
from tests.inference.slot_process import wait_until

MAX_REQUESTS = 16
ENV = {"TATKAL_ENGINE": "tests.faults.mixed_engine:load"}
RATE = 10.0
# A KV cache of terabytes, which the long context of the checkpoint could fill.
TOO_LARGE = {"kv_cache_bytes": 2**42, "standby_kv_bytes": 2**42}
# Every request is copied, and nothing ends the step but the candidate.
POLICY: dict[str, Any] = {
    "metrics": {"failure_rate": {"kind": "flags", "flags": []}},
    "steps": [{"type": "shadow", "share": 1.0, "floor": 100_000, "until": "floor"}],
}

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


async def test_a_candidate_that_cannot_be_loaded_fails_alone(instance: Instance) -> None:
    async with served_without_error(instance):
        version = await import_version(instance, "overflowing", checkpoints.write_overflowing)
        instance.change(candidate=version)
        await asyncio.to_thread(wait_until_told_why, instance, version, "its numbers are broken")

    assert instance.endpoint()["live"] == OLD


async def test_a_candidate_that_cannot_fit_is_refused_with_the_numbers(instance: Instance) -> None:
    async with served_without_error(instance):
        version = await import_version(
            instance, "giant", checkpoints.write_long_context, **TOO_LARGE
        )
        with pytest.raises(ApiRefused) as refused:
            instance.change(candidate=version)

    problem = refused.value.response.json()
    assert (problem["status"], problem["code"]) == (409, "does_not_fit")
    assert problem["fit"]["needed_bytes"] > 2**42
    assert "are available beside" in problem["detail"]
    assert instance.endpoint()["candidate"] != version


async def test_a_rollout_of_what_cannot_be_loaded_fails_and_says_why(
    instance: Instance, office: Office
) -> None:
    async with served_without_error(instance):
        version = await import_version(instance, "overflows", checkpoints.write_overflowing)
        run = start(instance, office, version)
        ended = await asyncio.to_thread(run.wait_for_state, "failed")

    event = run.events()[-1]
    assert event["type"] == "rollout.failed"
    assert f"{version} could not be loaded" in event["reason"]
    assert "its numbers are broken" in event["reason"]
    assert ended["verdict"] == "INCONCLUSIVE", "Nothing was said about its answers."


async def test_a_rollout_fails_whose_candidate_is_killed_again_and_again(
    instance: Instance, office: Office, candidate: str
) -> None:
    async with served_without_error(instance):
        run = start(instance, office, candidate)
        await asyncio.to_thread(run.wait_for_step, 0)
        killing = asyncio.create_task(asyncio.to_thread(kill_until_ended, run, candidate))
        ended = await asyncio.to_thread(run.wait_for_state, "failed")
        num_killed = await killing

    assert num_killed > 1, "Once is not enough: another slot takes it, and the rollout goes on."
    assert candidate in ended["why"].lower()
    assert instance.endpoint()["candidate"] is None


async def test_a_rollout_fails_whose_candidate_hangs(
    instance: Instance, office: Office, candidate: str
) -> None:
    async with served_without_error(instance):
        run = start(instance, office, candidate)
        await asyncio.to_thread(run.wait_for_step, 0)
        live = slot_of(instance.endpoint(), OLD)
        with ExitStack() as frozen:
            for slot in {"engine-0", "engine-1", "engine-2"} - {live}:
                frozen.enter_context(instance.frozen(slot))
            await asyncio.to_thread(run.ask_office, "wait_out")
            ended = await asyncio.to_thread(run.wait_for_state, "failed")

    assert f"No slot has held {candidate} ready for 3" in ended["why"]


@pytest.fixture(scope="module")
def office(shared_instance: Instance) -> Iterator[Office]:
    with open_office(shared_instance) as office:
        yield office


@pytest.fixture(scope="module")
def candidate(shared_instance: Instance) -> str:
    """A good version on the real engine, which takes a moment to load."""
    version = register(shared_instance, "good", checkpoints.write_chatty)
    assert wait_for_import(shared_instance, version)["state"] == "ready"
    return version


def start(instance: Instance, office: Office, version: str) -> RolloutRun:
    """A rollout of ``version``, after the candidate that was set by hand is let go."""
    if instance.endpoint()["candidate"]:
        instance.change(candidate=None)
    return RolloutRun.start(instance, office, version, POLICY)


def kill_until_ended(run: RolloutRun, version: str) -> int:
    """Kill whichever process holds ``version``, or is about to, until the rollout has ended; how many there were."""
    killed: set[int] = set()
    while run.read()["is_active"]:
        with Queue(run.instance.redis_url) as queue:
            holders = [slot.slot for slot in list_slots(queue) if slot.version == version]
        for slot in holders:
            pid = run.instance.pid(slot)
            if pid and pid not in killed:
                killed.add(run.instance.send(slot, signal.SIGKILL))
        time.sleep(0.1)
    return len(killed)


@asynccontextmanager
async def served_without_error(instance: Instance) -> AsyncIterator[None]:
    """Load on the live version meanwhile: every answer is whole, and nothing is left."""
    async with Load(instance.run) as load:
        sending = asyncio.create_task(load.run(rate=RATE, duration_s=120.0))
        await asyncio.sleep(0.5)
        try:
            yield
            await asyncio.sleep(0.5)
        finally:
            sending.cancel()
        records = await load.end()
    report = check(records, num_sent=load.num_sent, golden=instance.golden())
    assert report.is_clean, report
    assert report.counts == {Outcome.OK: load.num_sent}, report
    assert {record.version for record in records} == {OLD}
    await wait_until_drained(instance)


async def import_version(instance: Instance, name: str, write: Write, **options: int) -> str:
    """Register what ``write`` writes, and wait for it; the version's name."""
    version = register(instance, name, write, **options)
    state = await asyncio.to_thread(wait_for_import, instance, version)
    assert state["state"] == "ready", state["state_reason"]
    return version


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
