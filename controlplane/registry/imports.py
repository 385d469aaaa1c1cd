"""Running the importer: a child process with limits, watched while it works.

Files that people bring are parsed in a process of its own, with bounded memory and time and without our secrets, so
that a hostile or broken file costs one child and nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Timer
from typing import IO, Any, cast

PROJECT_ROOT = Path(__file__).resolve().parents[2]
MAX_LINE_BYTES = 2**20
BEAT_S = 5.0
MAX_ERROR_CHARACTERS = 2000
# Names a child needs to find its interpreter, libraries and locale; everything else stays here.
CHILD_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class ImportFailed(Exception):
    """The importer ended without an artifact; ``code`` is the importer's own, or says how it ended.

    ``may_retry`` is set where nothing is wrong with the source: the child was told to stop.
    """

    def __init__(self, code: str, message: str, *, may_retry: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.may_retry = may_retry


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may use: seconds from start to end, and bytes of address space."""

    timeout_s: float = 1800.0
    memory_bytes: int = 64 * 2**30


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an import is; ``total`` 0 means that the importer does not know."""

    done: int
    total: int
    what: str


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Where the artifact lies, and its manifest as the importer printed it."""

    artifact: Path
    manifest: Mapping[str, Any]


def run_import(
    arguments: list[str],
    *,
    limits: Limits,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_beat: Callable[[], None] = lambda: None,
) -> ImportReport:
    """Run ``python -m inference.importers`` with ``arguments`` to its end, and read its report.

    ``on_beat`` is called every ``BEAT_S`` seconds meanwhile, also while the child says nothing. The child ends when
    this process does, however that ends, and when ``on_beat`` or ``on_progress`` raise.

    Raises:
        ImportFailed: it refused the source, crashed, was killed, or took longer than it may.
    """
    expired = Event()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "inference.importers", "--end-with-stdin", *arguments],
            stdin=subprocess.PIPE,  # never written: its end tells the child that we are gone
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=PROJECT_ROOT,
            env={name: os.environ[name] for name in CHILD_ENVIRONMENT if name in os.environ},
        )
        watchdog = Timer(limits.timeout_s, _expire, (child, expired))
        watchdog.daemon = True
        watchdog.start()
        try:
            limit_memory(child.pid, limits.memory_bytes)
            report = _read_report(child, on_progress, on_beat)
            status = _wait(child, on_beat)
        finally:
            watchdog.cancel()
            if child.poll() is None:
                child.kill()
                child.wait(timeout=10)
            cast("IO[bytes]", child.stdin).close()
        if expired.is_set():
            raise ImportFailed("timed_out", f"The import took longer than {limits.timeout_s:g} s.")
        return _conclude(report, status, limits=limits, errors=errors)


def _expire(child: subprocess.Popen[bytes], expired: Event) -> None:
    expired.set()
    child.kill()


def limit_memory(pid: int, memory_bytes: int) -> None:
    """Bound the address space of a child that was just started."""
    # A function run between fork and exec is not safe in a process with threads, so the limit is set from outside;
    # where the system cannot do that (macOS) the time limit alone holds.
    if hasattr(resource, "prlimit"):
        try:
            resource.prlimit(pid, resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        except ProcessLookupError:
            return  # It has ended already; its exit status tells why.


def _wait(child: subprocess.Popen[bytes], on_beat: Callable[[], None]) -> int:
    """The status of a child that has closed its output; the watchdog is what ends one that does not end."""
    while True:
        try:
            return child.wait(timeout=BEAT_S)
        except subprocess.TimeoutExpired:
            on_beat()


def _read_report(
    child: subprocess.Popen[bytes],
    on_progress: Callable[[Progress], None],
    on_beat: Callable[[], None],
) -> dict[str, Any]:
    """The last line of consequence (``done`` or ``refused``), or an empty report."""
    report: dict[str, Any] = {}
    with cast("IO[bytes]", child.stdout) as output:
        for event in _events(_lines(output, on_beat)):
            if event.get("event") == "progress":
                on_progress(Progress(int(event["done"]), int(event["total"]), str(event["what"])))
            else:
                report = event
    return report


def _lines(output: IO[bytes], on_beat: Callable[[], None]) -> Iterator[bytes]:
    """Line by line what the child prints; a line that never ends comes in pieces, and a silence in beats."""
    pending, beat_at = b"", time.monotonic() + BEAT_S
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            is_readable = bool(selector.select(max(0.0, beat_at - time.monotonic())))
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                on_beat()
            if not is_readable:
                continue
            data = os.read(output.fileno(), MAX_LINE_BYTES)
            *lines, pending = (pending + data).split(b"\n")
            yield from (line for line in lines if line)
            if pending and (not data or len(pending) > MAX_LINE_BYTES):
                yield pending
                pending = b""
            if not data:
                return


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError as error:
            text = line[:200].decode(errors="replace")
            raise ImportFailed(
                "broken_report", f"The importer printed {text!r}, not JSON."
            ) from error
        if isinstance(event, dict):
            yield event


def _conclude(
    report: Mapping[str, Any], status: int, *, limits: Limits, errors: IO[bytes]
) -> ImportReport:
    if status == 0 and report.get("event") == "done":
        return ImportReport(Path(report["artifact"]), report["manifest"])
    if report.get("event") == "refused":
        raise ImportFailed(str(report["code"]), str(report["message"]))
    if status in (-signal.SIGTERM, -signal.SIGINT):
        raise ImportFailed("interrupted", "The import was told to stop.", may_retry=True)
    raise ImportFailed(
        "crashed",
        f"The importer ended with status {status} (limit {limits.memory_bytes} bytes of memory): "
        f"{_tail(errors) or 'it left no message'}",
    )


def _tail(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - MAX_ERROR_CHARACTERS))
    return errors.read().decode(errors="replace").strip()
