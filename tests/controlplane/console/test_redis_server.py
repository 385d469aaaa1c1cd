"""The Redis that comes along: found, and configured so that nothing it holds is dropped."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from controlplane.console import redis_server
from controlplane.console.home import Home, HomeInUse
from controlplane.console.redis_server import (
    NoRedisServer,
    check_not_running,
    find_server,
    write_config,
)
from inference.queue import Queue, QueueUnavailable


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.of_environment({"TATKAL_HOME": str(tmp_path / "a home")})


def test_a_server_is_found_that_starts() -> None:
    version = subprocess.run(
        [find_server(), "--version"], capture_output=True, text=True, check=True, timeout=10
    )
    assert "server v=" in version.stdout.lower()


def test_a_server_on_path_is_the_second_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    server = tmp_path / "redis-server"
    server.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == server
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoRedisServer, match="REDIS_URL"):
        redis_server.find_server()


@pytest.mark.slow
def test_the_configured_server_asks_for_the_password_and_never_evicts(home: Home) -> None:
    port = home.redis_port(must_be_free=True)
    write_config(home, port=port, max_memory="64mb")
    assert stat.S_IMODE(home.redis_config.stat().st_mode) == 0o600
    server = subprocess.Popen(
        [find_server(), str(home.redis_config)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if "Ready to accept" in line:
                break
        with Queue(home.redis_url()) as queue:
            queue.ping()
            settings = queue._redis.config_get("appendonly", "appendfsync", "maxmemory*")
            assert settings["appendonly"] == "yes"
            assert settings["appendfsync"] == "everysec"
            assert settings["maxmemory-policy"] == "noeviction"
            assert settings["maxmemory"] == str(64 * 2**20)
        stranger = Queue(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(QueueUnavailable, match=r"(?i)auth"):
            stranger.ping()
        stranger.close()
        with pytest.raises(HomeInUse, match=f"port {port}"):
            check_not_running(home)
    finally:
        server.terminate()
        server.wait(timeout=20)
        if server.stdout is not None:
            server.stdout.close()
    check_not_running(home)


def test_a_stranger_on_the_kept_port_is_no_redis_of_ours(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        (home.path / "redis.port").write_text(str(stranger.getsockname()[1]))
        threading.Thread(target=lambda: stranger.accept()[0].close(), daemon=True).start()
        check_not_running(home)
