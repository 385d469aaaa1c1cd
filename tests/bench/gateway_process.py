"""A gateway in a process of its own, and one API key that it accepts."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from controlplane.access.cache import KEY_PREFIX, KeyRecord, digest_key
from inference.queue import Queue
from tests.inference.slot_process import ROOT, wait_until
from tests.redis_server import free_port

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where it listens, what opens it, and which process it is."""

    url: str
    api_key: str
    pid: int

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.api_key}"}

    def cpu_s(self) -> float:
        """Processor seconds that the process has used so far (Linux)."""
        text = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


@contextmanager
def run_gateway(redis_url: str, log: Path) -> Iterator[Gateway]:
    """Start a gateway as `make run` does, wait until it lives, and end it with the context."""
    api_key = f"{KEY_PREFIX}-bench-{secrets.token_urlsafe(32)}"
    with Queue(redis_url) as queue:
        queue.put_keys({"bench": KeyRecord(digest_key(api_key), "bench").to_json()})
    port = free_port()
    command = (
        "-m uvicorn controlplane.asgi:application --http controlplane.connection:Connection --host 127.0.0.1 "
        f"--port {port} --lifespan on --ws none --no-server-header --log-level warning"
    )
    env = os.environ | {
        "DJANGO_SETTINGS_MODULE": "controlplane.settings.gateway",
        "REDIS_URL": redis_url,
        "TATKAL_SECRET_KEY": "bench",
        "PORT": str(port),
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command.split()], cwd=ROOT, env=env, stdout=output, stderr=output
        )
    gateway = Gateway(f"http://127.0.0.1:{port}", api_key, process.pid)
    try:
        wait_until(lambda: _is_alive(gateway.url), timeout_s=30)
        yield gateway
    finally:
        process.terminate()
        process.wait(40)


def _is_alive(url: str) -> bool:
    try:
        return httpx.get(f"{url}/livez", timeout=2).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
