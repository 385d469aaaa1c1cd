"""The home of an installation: one owner at a time, secrets made once, ports kept."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controlplane.console.home import (
    MAX_SOCKET_PATH,
    Home,
    HomeInUse,
    PortTaken,
    check_ports,
    find_free_ports,
    is_free,
)

LOCK = """
import sys
from pathlib import Path
from controlplane.console.home import LOCK_FD, Home
Home(Path(sys.argv[1])).lock()
print("locked", flush=True)
"""
HOLD = LOCK + "sys.stdin.read()\n"
EXEC = (
    LOCK
    + """
import os
os.set_inheritable(LOCK_FD, True)
os.execv(sys.executable, [sys.executable, "-c", "import sys; sys.stdin.read()"])
"""
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.of_environment({"TATKAL_HOME": str(tmp_path / "home")})


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def start(program: str, home: Home) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(home.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


@pytest.mark.parametrize("program", [HOLD, EXEC])
def test_a_home_in_use_names_its_owner_also_after_exec_and_is_free_when_it_ends(
    program: str, home: Home
) -> None:
    with start(program, home) as owner:
        with pytest.raises(HomeInUse, match=f"in use by process {owner.pid}"):
            home.lock()
        owner.kill()
        owner.wait(timeout=10)
    with start(HOLD, home) as second:
        second.kill()


def test_the_home_is_ours_alone(home: Home) -> None:
    assert mode(home.path) == 0o700
    assert mode(home.secret("secret_key")) == 0o600
    home.write_run({"api_key": "x"})
    assert mode(home.run_file) == 0o600


def test_a_secret_is_made_once(home: Home) -> None:
    first = home.secret("secret_key").read_text()
    assert len(first.strip()) >= 50
    assert home.secret("secret_key").read_text() == first
    assert home.secret("redis_password").read_text() != first


def test_those_who_make_a_secret_at_once_agree(home: Home) -> None:
    program = (
        "import sys; from pathlib import Path; from controlplane.console.home import Home\n"
        "print(Home(Path(sys.argv[1])).secret('s').read_text())"
    )
    command = [sys.executable, "-c", program, str(home.path)]
    with ThreadPoolExecutor(4) as pool:
        texts = {
            run.stdout
            for run in pool.map(
                lambda _: subprocess.run(command, capture_output=True, check=True, timeout=30),
                range(4),
            )
        }
    assert len(texts) == 1
    assert [path.name for path in (home.path / "secrets").iterdir()] == ["s"]


def test_the_port_of_redis_is_kept_while_it_is_free(home: Home, listener: int) -> None:
    port = home.redis_port()
    assert home.redis_port(must_be_free=True) == port
    (home.path / "redis.port").write_text(str(listener))
    assert home.redis_port() == listener, "a running Redis is found where it listens"
    moved = home.redis_port(must_be_free=True)
    assert moved != listener
    assert home.redis_port() == moved


def test_a_taken_port_is_named_with_the_variable_that_moves_it(listener: int) -> None:
    with pytest.raises(PortTaken, match=rf"Port {listener} .* CONTROL_PORT=<port>"):
        check_ports("127.0.0.1", {"CONTROL_PORT": listener})
    assert not is_free("127.0.0.1", listener)


def test_two_processes_cannot_share_a_port(listener: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    with pytest.raises(PortTaken, match="different ports"):
        check_ports("127.0.0.1", {"PORT": free, "CONTROL_PORT": free})


def test_the_environment_gets_what_is_missing_and_keeps_what_is_set(home: Home) -> None:
    environ: dict[str, str] = {}
    home.fill_environment(environ)
    assert environ["TATKAL_HOME"] == str(home.path)
    assert Path(environ["TATKAL_SECRET_KEY_FILE"]).is_file()
    assert environ["REDIS_URL"].startswith("redis://:")
    assert environ["TATKAL_EMBEDDED_REDIS"] == "true"
    theirs = {"REDIS_URL": "redis://redis.example/0", "TATKAL_SECRET_KEY": "theirs"}
    home.fill_environment(theirs)
    assert theirs["REDIS_URL"] == "redis://redis.example/0"
    assert "TATKAL_EMBEDDED_REDIS" not in theirs
    assert "TATKAL_SECRET_KEY_FILE" not in theirs


def test_a_damaged_run_file_is_as_good_as_none(home: Home) -> None:
    assert home.read_run() == {}
    home.write_run({"api_key": "x"})
    assert home.read_run() == {"api_key": "x"}
    for text in ('{"api', "[]"):
        home.run_file.write_text(text)
        assert home.read_run() == {}


def test_a_socket_fits_however_deep_the_home_lies(tmp_path: Path) -> None:
    shallow, deep = Home(Path("/srv/tatkal")), Home(tmp_path / ("x" * 120))
    assert shallow.supervisor_socket == Path("/srv/tatkal/supervisor.sock")
    assert len(os.fsencode(deep.supervisor_socket)) <= MAX_SOCKET_PATH
    assert deep.supervisor_socket != Home(tmp_path / ("y" * 120)).supervisor_socket


def test_ports_in_a_row_begin_above_one_that_is_taken(listener: int) -> None:
    found = find_free_ports("127.0.0.1", listener, 2)
    assert found > listener
    assert all(is_free("127.0.0.1", port) for port in (found, found + 1))


def test_where_no_port_is_left_there_is_none() -> None:
    assert find_free_ports("127.0.0.1", 65_530, 10) == 0
