"""Real engine processes for tests: the worker as it is run in production, around the instant engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
LEASE_MS = 800


class SlotProcess:
    """One slot in a process of its own; leaving the context kills it."""

    def __init__(self, redis_url: str, slot: str, log: Path, **env: str) -> None:
        self.slot = slot
        self._log = log
        self._env = os.environ | {
            "REDIS_URL": redis_url,
            "TATKAL_SLOT": slot,
            "TATKAL_ENGINE": "tests.inference.instant_engine:load",
            "TATKAL_LEASE_MS": str(LEASE_MS),
            "TATKAL_DRAIN_S": "5",
            "OMP_NUM_THREADS": "1",
            **env,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def start(self) -> None:
        """Start it, as a supervisor would."""
        command = (
            f"-m celery -A inference.worker worker -P threads --concurrency 1 -n {self.slot}@test "
            "--without-gossip --without-mingle --without-heartbeat --loglevel INFO"
        )
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command.split()], cwd=ROOT, env=self._env, stdout=log, stderr=log
            )
        self.num_starts += 1

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    @property
    def pid(self) -> int:
        """The process as it was started last."""
        if self._process is None:
            raise ValueError("The slot was never started.")
        return self._process.pid

    def wait(self, timeout_s: float = 15.0) -> int:
        """Its exit status."""
        if self._process is None:
            raise ValueError("The slot was never started.")
        return self._process.wait(timeout_s)

    def restart_if_dead(self) -> None:
        """What a supervisor does all the time."""
        if self._process is not None and self._process.poll() is not None:
            self.start()

    def read_log(self) -> str:
        """All it wrote so far."""
        return self._log.read_text(encoding="utf-8")


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 15.0) -> None:
    """Return once ``is_true``.

    Raises:
        TimeoutError: it did not become true in time.
    """
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Not true within {timeout_s} s.")
        time.sleep(0.02)
