"""A slot process that becomes one of another interpreter, keeps its place meanwhile, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from inference.protocol import Resident
from inference.replicas import SlotStatus, list_failures
from inference.runtime import describe
from inference.slot.config import SlotConfig
from inference.slot.runtime import make_environment as make_process_environment
from tests.inference.slot_process import SlotProcess, wait_until
from tests.inference.slot_site import Site
from tests.redis_server import RedisServer
from tests.virtual_environment import add_release, make_environment

PLAIN = Resident("chat", "small/1", "/artifact")


@pytest.fixture
def site(redis_server: RedisServer, redis_url: str, tmp_path: Path) -> Iterator[Site]:
    assert redis_url == redis_server.url
    with ExitStack() as stack:
        yield Site(redis_server, tmp_path, stack)


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """An environment below the allowed directory."""
    (tmp_path / "runtimes").mkdir()
    return make_environment(tmp_path / "runtimes" / "next", plum="2.0")


@pytest.fixture
def other(runtime: Path) -> Resident:
    """The same version under that environment."""
    return Resident(
        "chat", "small/2", "/artifact", runtime=str(runtime), runtime_digest=digest_with(plum="2.0")
    )


def digest_with(**releases: str) -> str:
    facts = describe()
    return type(facts)(facts.python, facts.machine, {**facts.packages, **releases}).digest


def start(site: Site, runtime: Path) -> SlotProcess:
    return site.start_slot("slot-1", TATKAL_RUNTIME_ROOTS=str(runtime.parent))


def wait_for(site: Site, slot: SlotProcess, version: str) -> SlotStatus:
    """The slot's report, once it holds ``version`` ready."""

    def is_ready() -> bool:
        return any((each.version, each.state) == (version, "ready") for each in site.slots())

    try:
        wait_until(is_ready, timeout_s=60)
    except TimeoutError as error:
        raise TimeoutError(
            f"{site.slots()} {list_failures(site.queue)}\n{slot.read_log()}"
        ) from error
    return next(each for each in site.slots() if each.version == version)


def interpreter_of(slot: SlotProcess) -> str:
    """The program that the process runs now."""
    return Path(f"/proc/{slot.pid}/cmdline").read_bytes().split(b"\0")[0].decode()


@pytest.mark.slow
def test_a_slot_runs_a_version_under_its_runtime_and_the_next_under_its_own(
    site: Site, runtime: Path, other: Resident
) -> None:
    site.publish(PLAIN)
    slot = start(site, runtime)
    before = wait_for(site, slot, PLAIN.version)
    first, pid = interpreter_of(slot), slot.pid

    site.publish(other)
    there = wait_for(site, slot, other.version)
    second = interpreter_of(slot)
    site.publish(PLAIN)
    wait_for(site, slot, PLAIN.version)

    assert before.runtime == ""
    assert second == str(runtime / "bin" / "python")
    assert other.runtime_digest in there.runtime
    assert interpreter_of(slot) == first
    assert slot.pid == pid, "Whoever supervises the process sees the same one all the time."
    assert slot.num_starts == 1


@pytest.mark.slow
def test_a_slot_keeps_its_place_while_it_changes_its_runtime(
    site: Site, runtime: Path, other: Resident
) -> None:
    site.publish(other)
    slot = start(site, runtime)
    seen: set[str] = set()

    def is_ready() -> bool:
        reports = site.slots()
        seen.update(report.state for report in reports if not report.version)
        if is_under_way():
            assert [report.version for report in reports] == [other.version]
        return any(report.state == "ready" for report in reports)

    def is_under_way() -> bool:
        return bool(list_failures(site.queue))

    wait_until(is_ready, timeout_s=60)

    assert seen <= {"waiting"}
    assert not list_failures(site.queue)
    assert "slot changes its runtime" in slot.read_log()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["changed", "outside", "dies"])
def test_a_runtime_that_cannot_be_entered_is_a_failed_load_that_says_why(
    site: Site, runtime: Path, other: Resident, fault: str
) -> None:
    roots, reason = runtime, "slot"
    if fault == "changed":
        add_release(runtime, "pear", "1.0")
        reason = "is not as it was when small/2 was registered"
    elif fault == "outside":
        roots, reason = runtime / "bin", "outside the allowed directories"
    else:
        python = runtime / "bin" / "python"
        python.unlink()
        python.write_text("#!/bin/sh\nexit 3\n")
        python.chmod(0o755)
        reason = "the process ended while it loaded this version"
    site.publish(other)
    slot = start(site, roots)

    def is_told() -> bool:
        slot.restart_if_dead()
        return any(reason in each.detail for each in list_failures(site.queue))

    wait_until(is_told, timeout_s=60)
    assert not any(report.state == "ready" for report in site.slots())


def test_the_environment_of_the_next_process_forgets_the_interpreter_that_is_left() -> None:
    config = SlotConfig("slot-1", "redis://127.0.0.1:1/0", base_python="/usr/bin/python3")
    resident = Resident("chat", "small/2", "/a", runtime="/r/next", runtime_digest="d1")

    found = make_process_environment({"VIRTUAL_ENV": "/old", "A": "1"}, resident, config, "{}")

    assert found == {
        "A": "1",
        "TATKAL_RUNTIME": "/r/next",
        "TATKAL_ENGINE_RUNTIME": "d1",
        "TATKAL_BASE_PYTHON": "/usr/bin/python3",
        "TATKAL_HANDOVER": "{}",
    }
