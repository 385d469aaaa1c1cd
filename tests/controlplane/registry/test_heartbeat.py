"""An import is its worker's for as long as that is heard of: taken over when it is dead, and never while it lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from controlplane.registry import imports, services
from controlplane.registry.imports import ImportReport, Limits, run_import
from controlplane.registry.models import Version
from tests.controlplane.registry.test_services import MANIFEST
from tests.factories import NOW, make_version
from tests.inference.slot_process import ROOT, wait_until

LIMITS = Limits(timeout_s=60, memory_bytes=16 * 2**30)


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def importing(tmp_path: Path) -> services.Importing:
    return services.Importing(root=tmp_path)


@pytest.fixture
def source(tmp_path: Path, settings: Any) -> str:
    """A file below the one allowed root."""
    settings.MODEL_ROOTS = (tmp_path,)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def during_import(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Callable[[], None]], None]
) -> list[str]:
    """Replaces the child process: ``act`` is given what tells that its worker lives. What ran, in order."""
    runs: list[str] = []

    def run(arguments: list[str], *, on_beat: Callable[[], None], **_: Any) -> ImportReport:
        runs.append(arguments[1])
        if len(runs) == 1:
            act(on_beat)
        return ImportReport(Path("/artifacts/abc"), MANIFEST)

    monkeypatch.setattr(imports, "run_import", run)
    return runs


@pytest.mark.django_db
def test_a_dead_import_is_taken_over_after_a_minute_of_silence_and_holds_up_nobody_longer(
    importing: services.Importing, source: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = make_version(state="importing", source=source, import_started_at=NOW, heartbeat_at=NOW)
    waiting = make_version(model="other", state="pending", source=source)
    runs = during_import(monkeypatch, lambda _: None)
    clock.advance(services.SILENT_S - 1)
    assert services.import_pending(importing=importing, clock=clock) is None
    clock.advance(2)
    assert services.import_pending(importing=importing, clock=clock) == dead
    assert services.import_pending(importing=importing, clock=clock) == waiting
    assert len(runs) == 2


@pytest.mark.django_db
def test_a_long_import_that_is_heard_of_is_never_taken_over(
    importing: services.Importing, source: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_version(state="pending", source=source)

    def take_long(beat: Callable[[], None]) -> None:
        for _ in range(40):
            clock.advance(services.SILENT_S - 1)
            beat()
            assert services.import_pending(importing=importing, clock=clock) is None

    runs = during_import(monkeypatch, take_long)
    version = services.import_pending(importing=importing, clock=clock)
    assert version is not None
    assert version.is_ready
    assert version.heartbeat_at is None
    assert len(runs) == 1


@pytest.mark.django_db
def test_a_worker_that_was_silent_for_too_long_stops_and_its_result_does_not_count(
    importing: services.Importing, source: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_version(state="pending", source=source)

    def sleep_and_wake(beat: Callable[[], None]) -> None:
        clock.advance(services.SILENT_S + 1)
        assert services.import_pending(importing=importing, clock=clock) is not None
        Version.objects.update(state=Version.State.IMPORTING, artifact="")
        with pytest.raises(services.TakenOver):
            beat()

    during_import(monkeypatch, sleep_and_wake)
    assert services.import_pending(importing=importing, clock=clock) is None
    assert Version.objects.get().state == Version.State.IMPORTING, "it is the other worker's"


@pytest.mark.django_db
def test_a_heartbeat_between_look_and_grasp_keeps_the_import(
    importing: services.Importing, source: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = during_import(monkeypatch, lambda _: None)
    seen = make_version(state="importing", source=source, import_started_at=NOW, heartbeat_at=NOW)
    Version.objects.update(heartbeat_at=NOW + timedelta(seconds=services.SILENT_S))
    clock.advance(services.SILENT_S + 1)
    assert services.import_version(version=seen, importing=importing, clock=clock) is None
    assert runs == []


def make_child(directory: Path, text: str) -> None:
    """A module that runs in place of the importer."""
    package = directory / "inference" / "importers"
    package.mkdir(parents=True)
    (directory / "inference" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(text)


@pytest.mark.parametrize(
    "silence",
    ["time.sleep(1)", "sys.stdout.flush(); os.close(1); time.sleep(1)"],
    ids=["before its last word", "after its last word"],
)
@pytest.mark.slow
def test_a_child_that_says_nothing_leaves_its_worker_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silence: str
) -> None:
    monkeypatch.setattr(imports, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(imports, "BEAT_S", 0.1)
    done = """print('{"event":"done","artifact":"/a","manifest":{}}')"""
    first, second = (silence, done) if silence.startswith("time") else (done, silence)
    make_child(tmp_path, f"import os, sys, time\n{first}\n{second}\n")
    beats: list[int] = []
    run_import([], limits=LIMITS, on_beat=lambda: beats.append(1))
    assert 5 <= len(beats) <= 12


def test_a_child_ends_when_its_worker_hears_that_it_was_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(imports, "BEAT_S", 0.1)
    place = tmp_path / "pid"
    text = f"import os, pathlib, time\npathlib.Path({str(place)!r}).write_text(str(os.getpid()))\n"
    make_child(tmp_path, f"{text}time.sleep(60)\n")

    def hear() -> None:
        if place.exists():
            raise services.TakenOver

    with pytest.raises(services.TakenOver):
        run_import([], limits=LIMITS, on_beat=hear)
    assert not Path(f"/proc/{place.read_text()}").exists()


@pytest.mark.slow
def test_the_importer_ends_with_a_worker_that_was_killed(tmp_path: Path) -> None:
    """The real importer, on a source that never comes: a worker that dies takes it along."""
    fifo = tmp_path / "tiny.gguf"
    os.mkfifo(fifo)
    program = (
        "from controlplane.registry.imports import Limits, run_import\n"
        f"run_import(['gguf', {str(fifo)!r}, '--root', {str(tmp_path)!r}], limits=Limits())\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        wait_until(lambda: bool(children_of(worker.pid)), timeout_s=10)
        (child,) = children_of(worker.pid)
        wait_until(lambda: b"--end-with-stdin" in command_of(child), timeout_s=10)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait(10)
    wait_until(lambda: not command_of(child), timeout_s=10)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> bytes:
    """Empty for a process that has ended."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes() if path.exists() else b""
