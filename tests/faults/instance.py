"""A whole instance for tests: everything that `make run` starts, in its own home, on its own ports.

Each process is known by its pid, so that a fault hits exactly one; and when the instance has stopped, not one
process of its session may be left.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import xmlrpc.client
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import redis
from supervisor.xmlrpc import SupervisorTransport

from controlplane.console.home import Home
from tests.faults.history import Golden
from tests.faults.states import has_ready
from tests.inference.instant_engine import golden_text
from tests.inference.slot_process import ROOT, wait_until
from tests.redis_server import free_port

OLD, NEW = "smollm2-135m-instruct/1", "smollm2-135m-instruct/2"
NUM_SLOTS = 3
STEP_S = 0.01
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 75.0
API_TIMEOUT_S = 30.0
# Imports the quantised demo version too, which a worker would do in the middle of a test.
IMPORT_ALL = (
    "from controlplane.tasks.control import import_pending\n"
    "from controlplane.registry.models import Version\n"
    "while Version.objects.exclude(state__in=['ready', 'failed']).exists(): import_pending()"
)


class ProcessLeft(AssertionError):
    """The instance has stopped, and a process of it still runs."""


def prepare_home(path: Path) -> None:
    """Make a home with secrets, database and both demo versions, to be copied by ``Instance``."""
    for command in (["prepare"], ["shell", "--no-imports", "-c", IMPORT_ALL]):
        subprocess.run(
            [sys.executable, "manage.py", *command],
            cwd=ROOT,
            env=_environment(path, {}),
            check=True,
            timeout=START_TIMEOUT_S,
            capture_output=True,
        )


class Instance:
    """One installation as `make run` starts it, around the instant engine unless ``env`` names another.

    A step of that takes ``STEP_S``; ``max_requests`` run at once in a slot.
    """

    def __init__(self, template: Path, path: Path, *, max_requests: int, **env: str) -> None:
        # Artifacts are read only and large: their rows go on pointing into the template.
        shutil.copytree(
            template, path, ignore=shutil.ignore_patterns("artifacts", "redis*", "*.sock")
        )
        self.home = Home(path)
        self.output = path / "terminal.log"
        self._env = _environment(
            path,
            {
                "TATKAL_ENGINE": "tests.inference.instant_engine:load",
                "TATKAL_TEST_VOICES": "1",
                "TATKAL_TEST_STEP_S": str(STEP_S),
                "TATKAL_ENGINE_MAX_NUM_SEQS": str(max_requests),
                **env,
            },
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.run: dict[str, Any] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.end_all()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        if kind is None:
            self.stop()
        else:
            self.end_all()

    # ------------------------------------------------------------------------------------------------ processes

    def start(self) -> None:
        """Start everything, and return when the live version answers."""
        self.run = {}
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "manage.py", "prepare", "--run"],
                cwd=ROOT,
                env=self._env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            wait_until(self.is_ready, timeout_s=START_TIMEOUT_S)
        except TimeoutError as error:
            raise TimeoutError(f"The instance is not ready:\n{self.tail_of_logs()}") from error
        self.run = self.home.read_run()

    def stop(self) -> int:
        """What Ctrl-C does: end everything in order; the exit status.

        Raises:
            ProcessLeft: a process of the instance outlived it.
        """
        self.send_sigterm()
        return self.wait()

    def run_python(self, code: str) -> str:
        """What ``code`` prints in a process of its own, with the installation's database and settings."""
        done = subprocess.run(
            [sys.executable, "manage.py", "shell", "--no-imports", "-c", code],
            cwd=ROOT,
            env=self._env,
            check=True,
            timeout=START_TIMEOUT_S,
            capture_output=True,
            text=True,
        )
        return done.stdout

    def send_sigterm(self) -> None:
        """Tell the process manager to stop."""
        self._started().terminate()

    def wait(self) -> int:
        """The exit status of the process manager, when everything has ended.

        Raises:
            ProcessLeft: a process of the instance outlived it.
        """
        try:
            status = self._started().wait(STOP_TIMEOUT_S)
            if left := self.processes():
                raise ProcessLeft(f"Left behind: {left}")
        finally:
            self.end_all()
        return status

    def end_all(self) -> None:
        """Kill whatever of it still runs."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(10)

    def processes(self) -> dict[int, str]:
        """Every process of the instance's session that has not ended: pid and command."""
        sid = self._started().pid
        return {pid: command for pid, session, command in _list_processes() if session == sid}

    def pid(self, name: str) -> int:
        """The pid of a process by the name that the process manager knows, for instance ``engine-0``."""
        pid: int = self._process_info(name)["pid"]
        return pid

    def started_at(self, name: str) -> int:
        """When the process was started last, in epoch seconds."""
        started_at: int = self._process_info(name)["start"]
        return started_at

    def send(self, name: str, number: signal.Signals) -> int:
        """Send a signal to exactly one process; its pid."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    @contextmanager
    def frozen(self, name: str) -> Iterator[int]:
        """A process that hangs, until the block ends."""
        pid = self.send(name, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """A process that is not there, until the block ends."""
        with self._supervisor() as supervisor:
            supervisor.stopProcess(_full_name(name))
        try:
            yield
        finally:
            with self._supervisor() as supervisor:
                supervisor.startProcess(_full_name(name), False)

    def _process_info(self, name: str) -> dict[str, Any]:
        with self._supervisor() as supervisor:
            info: dict[str, Any] = supervisor.getProcessInfo(_full_name(name))
        return info

    @contextmanager
    def _supervisor(self) -> Iterator[Any]:
        transport = SupervisorTransport(serverurl=f"unix://{self.home.supervisor_socket}")
        proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
        try:
            yield proxy.supervisor
        finally:
            transport.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ValueError("The instance was never started.")
        return self._process

    # ------------------------------------------------------------------------------------------- REST and Redis

    @property
    def endpoint_name(self) -> str:
        """The endpoint of the demo."""
        name: str = self.run["endpoint"]
        return name

    @property
    def redis_url(self) -> str:
        """Where its Redis listens."""
        return self.home.redis_url()

    @property
    def env(self) -> dict[str, str]:
        """What its processes are started with, for one more beside them."""
        return dict(self._env)

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.home.path / "tatkal.sqlite3"

    def redis(self) -> redis.Redis:
        """A connection to its Redis, with texts as texts; close it."""
        return redis.Redis.from_url(self.redis_url, decode_responses=True, socket_timeout=5)

    def is_ready(self) -> bool:
        """Whether the live version answers, as the control process and the gateway see it."""
        self.run = self.home.read_run()
        if self._started().poll() is not None:
            raise AssertionError(f"The instance ended:\n{self.tail_of_logs()}")
        try:
            state = self.endpoint()
            gateway = httpx.get(f"{self.run['gateway_url']}/readyz", timeout=2)
        except (httpx.TransportError, ApiRefused, KeyError):
            return False
        return has_ready(state, state["live"]) and gateway.status_code == httpx.codes.OK

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call of the control API.

        Raises:
            ApiRefused: the answer is an error.
        """
        response = httpx.request(
            method,
            f"{self.run['control_url']}/api/v1/{path}",
            headers={"Authorization": f"Bearer {self.run['control_token']}"},
            json=body,
            timeout=API_TIMEOUT_S,
        )
        if not response.is_success:
            raise ApiRefused(response)
        return response.json()

    def endpoint(self) -> dict[str, Any]:
        """The endpoint of the demo with its roles."""
        state: dict[str, Any] = self.call("GET", f"endpoints/{self.run['endpoint']}")
        return state

    def change(self, **changes: Any) -> dict[str, Any]:
        """Patch the endpoint of the demo."""
        state: dict[str, Any] = self.call("PATCH", f"endpoints/{self.endpoint_name}", changes)
        return state

    def promote(self, version: str) -> dict[str, Any]:
        """Promote on the endpoint of the demo."""
        return self._act("promote", version=version, reason="a test")

    def rollback(self) -> dict[str, Any]:
        """Roll the endpoint of the demo back."""
        return self._act("rollback", reason="a test")

    def _act(self, action: str, **body: Any) -> dict[str, Any]:
        reply: dict[str, Any] = self.call("POST", f"endpoints/{self.endpoint_name}/{action}", body)
        return reply

    def voices(self) -> dict[str, str]:
        """What the instant engine calls itself in the answers of each version."""
        query = (
            "SELECT m.name || '/' || v.number, v.artifact FROM registry_version v "
            "JOIN registry_model m ON m.id = v.model_id WHERE v.artifact != ''"
        )
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as database:
            return {name: Path(artifact).name for name, artifact in database.execute(query)}

    def golden(self) -> Golden:
        """What every version answers to every prompt."""
        voices = self.voices()

        def answer(version: str, prompt: str, num_tokens: int, choice: int) -> str:
            voice = voices[version]
            return golden_text(num_tokens + choice, voice=voice, prompt=prompt, choice=choice)

        return answer

    def wait_for(self, is_true: Callable[[dict[str, Any]], bool], *, timeout_s: float = 30) -> None:
        """Return once the endpoint's state is as wished; a control process that is away is waited for."""
        seen: list[Any] = []

        def holds() -> bool:
            with suppress(httpx.TransportError, ApiRefused):
                seen[:] = [self.endpoint()]
                return is_true(seen[0])
            return False

        try:
            wait_until(holds, timeout_s=timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error} Last seen: {seen}\n{self.tail_of_logs()}") from error

    def tail_of_logs(self, num_chars: int = 1_500) -> str:
        """The end of every log, for a failed test's report."""
        logs = [self.output, *sorted(self.home.logs.glob("*.log"))]
        texts = ((log.name, log.read_text(errors="replace")[-num_chars:]) for log in logs)
        return "\n".join(f"--- {name}\n{text}" for name, text in texts if text)


class ApiRefused(Exception):
    """The control API answered with an error."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.status_code} {response.text[:500]}")
        self.response = response
        self.status = response.status_code


def _full_name(name: str) -> str:
    """The process manager puts a number of equal processes into a group."""
    return f"engine:{name}" if name.startswith("engine-") else name


def _environment(home: Path, env: Mapping[str, str]) -> dict[str, str]:
    """A clean environment: what the test runner's own settings say must not reach the instance."""
    kept = {name: value for name, value in os.environ.items() if _is_kept(name)}
    return kept | {
        "TATKAL_HOME": str(home),
        "PORT": str(free_port()),
        "CONTROL_PORT": str(free_port()),
        "TATKAL_ENGINE_SLOTS": str(NUM_SLOTS),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        **env,
    }


def _is_kept(name: str) -> bool:
    foreign = ("TATKAL_", "DJANGO_", "REDIS_URL", "DATABASE_URL", "PORT", "CONTROL_PORT")
    return not name.startswith(foreign)


def _list_processes() -> Iterator[tuple[int, int, str]]:
    """Pid, session and command of every process that is no zombie (Linux)."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            fields = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if fields[0] != "Z":
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                yield int(path.name), int(fields[3]), command.strip()
