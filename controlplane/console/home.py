"""The home directory of an installation: its lock, its secrets, its ports, and what `make run` tells people.

Nothing here imports Django: settings are read from the environment that this module fills.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

# A path of a Unix socket has room for about this many bytes.
MAX_SOCKET_PATH = 96
# supervisord closes every descriptor from 5 on when it starts, so the lock is moved to one that it leaves open.
LOCK_FD = 3
LOOPBACK = "127.0.0.1"
MAX_PORT = 65_535
MAX_PORT_TRIES = 100


class HomeInUse(Exception):
    """Another process runs on this home."""


class PortTaken(Exception):
    """Somebody listens where one of our processes should."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where an installation keeps everything; the directory is ours alone (mode 700)."""

    path: Path

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Home:
        """The home that TATKAL_HOME names, ``var`` below the current directory without it; made when absent."""
        path = Path(environ.get("TATKAL_HOME") or "var").resolve()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(path)

    @property
    def run_file(self) -> Path:
        """Addresses and credentials for people and for ``tatkal`` (mode 600)."""
        return self.path / "run.json"

    @property
    def logs(self) -> Path:
        """The log directory."""
        return self.path / "logs"

    @property
    def redis_config(self) -> Path:
        """Configuration of the embedded Redis (mode 600)."""
        return self.path / "redis.conf"

    @property
    def supervisor_socket(self) -> Path:
        """Where supervisord listens: in the home, or under a short name where that path is too long."""
        inside = self.path / "supervisor.sock"
        if len(os.fsencode(inside)) <= MAX_SOCKET_PATH:
            return inside
        digest = sha256(os.fsencode(self.path)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"tatkal-{os.getuid()}-{digest}.sock"

    def lock(self) -> None:
        """Hold the home until this process, and whatever it becomes by exec, has ended.

        Raises:
            HomeInUse: another process holds it; the message names its pid.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise HomeInUse(
                f"{self.path} is in use by process {pid}. Stop it, or set TATKAL_HOME to another directory."
            ) from error
        if descriptor != LOCK_FD:
            os.dup2(descriptor, LOCK_FD, inheritable=False)
            os.close(descriptor)
        os.ftruncate(LOCK_FD, 0)
        os.pwrite(LOCK_FD, f"{os.getpid()}\n".encode(), 0)

    def secret(self, name: str) -> Path:
        """The file of a secret, made at first use; two processes that make it at once agree on one."""
        path = self.path / "secrets" / name
        if not path.exists():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            draft = path.with_name(f"{name}.{os.getpid()}")
            _write_private(draft, secrets.token_urlsafe(48) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        return path

    def redis_port(self, *, must_be_free: bool = False) -> int:
        """The port of the embedded Redis: the one used before, or a free one that is kept from now on."""
        path = self.path / "redis.port"
        kept = path.read_text(encoding="ascii").strip() if path.exists() else ""
        if kept.isdigit() and not (must_be_free and not is_free(LOOPBACK, int(kept))):
            return int(kept)
        port = _free_port()
        replace_private(path, f"{port}\n")
        return port

    def redis_url(self, *, must_be_free: bool = False) -> str:
        """How every process reaches the embedded Redis."""
        password = quote(self.secret("redis_password").read_text(encoding="ascii").strip())
        return f"redis://:{password}@{LOOPBACK}:{self.redis_port(must_be_free=must_be_free)}/0"

    def fill_environment(self, environ: MutableMapping[str, str]) -> None:
        """Add what the settings need and the caller has not set."""
        environ["TATKAL_HOME"] = str(self.path)
        if not environ.get("TATKAL_SECRET_KEY"):
            environ.setdefault("TATKAL_SECRET_KEY_FILE", str(self.secret("secret_key")))
        if not environ.get("REDIS_URL") and not environ.get("REDIS_URL_FILE"):
            environ["REDIS_URL"] = self.redis_url()
            environ["TATKAL_EMBEDDED_REDIS"] = "true"

    def read_run(self) -> dict[str, Any]:
        """What the last run told; empty when there was none or the file is damaged."""
        try:
            run = json.loads(self.run_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return run if isinstance(run, dict) else {}

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Replace ``run.json`` at once, readable by its owner alone."""
        replace_private(self.run_file, json.dumps(run, indent=2) + "\n")


def is_free(host: str, port: int) -> bool:
    """Whether a process of ours could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """Nobody listens on any of ``ports``, which are named by the variable that moves them.

    Raises:
        PortTaken: the message names port, variable and mend.
    """
    for variable, port in ports.items():
        if not is_free(host, port):
            raise PortTaken(
                f"Port {port} on {host} is taken. Stop what listens there, or choose another with "
                f"{variable}=<port> make run."
            )
    if len(set(ports.values())) < len(ports):
        raise PortTaken(f"{' and '.join(ports)} must be different ports.")


def find_free_ports(host: str, first: int, count: int) -> int:
    """The first of ``count`` free ports in a row, not far above ``first``; 0 if there are none."""
    for start in range(first, min(first + MAX_PORT_TRIES, MAX_PORT - count)):
        if all(is_free(host, port) for port in range(start, start + count)):
            return start
    return 0


def replace_private(path: Path, text: str) -> None:
    """Put ``text`` at ``path`` at once, readable by its owner alone."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    _write_private(draft, text)
    draft.replace(path)


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
