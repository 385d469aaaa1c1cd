"""Two operators at once, each through a control process of their own: one of them wins, and nothing is left torn.

The database is an SQLite file, or with DATABASE_URL a fresh PostgreSQL database.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.queue import Queue
from tests.factories import hold_ready
from tests.inference.slot_process import wait_until
from tests.redis_server import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NUM_RACES = 200
SEED = 3
VERSIONS = ("tiny/1", "tiny/2", "tiny/3")
ENDPOINT = "/api/v1/endpoints/chat"


@pytest.fixture
def office(tmp_path: Path, redis_url: str) -> Iterator[dict[str, str]]:
    """The environment that both control processes share."""
    with database(tmp_path) as url:
        yield os.environ | {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings.control",
            "TATKAL_HOME": str(tmp_path),
            "TATKAL_SECRET_KEY": secrets.token_hex(32),
            "TATKAL_LOG_LEVEL": "ERROR",
            "REDIS_URL": redis_url,
            "DATABASE_URL": url,
        }


@contextmanager
def database(directory: Path) -> Iterator[str]:
    """A database of this test's own: a file, or one more in the server of DATABASE_URL."""
    server = os.environ.get("DATABASE_URL", "")
    if not server.startswith("postgres"):
        yield f"sqlite:///{directory / 'tatkal.sqlite3'}"
        return
    import psycopg  # noqa: PLC0415 (only where PostgreSQL is)

    name = f"operators_{secrets.token_hex(4)}"
    base, _, query = server.partition("?")
    with psycopg.connect(server, autocommit=True) as link:
        link.execute(f"CREATE DATABASE {name}")
        try:
            yield f"{base.rpartition('/')[0]}/{name}?{query}".rstrip("?")
        finally:
            link.execute(f"DROP DATABASE {name} WITH (FORCE)")


def ask(office: dict[str, str], what: str) -> Any:
    """What the office prints in a process of its own, which has the database of this test."""
    program = f"import django; django.setup(); from tests.flows.control_office import main; main({what!r})"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=office, stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 0
    return json.loads(done.stdout)


@contextmanager
def control_process(office: dict[str, str]) -> Iterator[str]:
    """The control process as it is run; its address."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "controlplane.asgi:application"]
    options = ["--port", str(port), "--lifespan", "on", "--ws", "none", "--log-level", "error"]
    connection = ["--http", "controlplane.connection:Connection"]
    process = subprocess.Popen([*command, *connection, *options], cwd=ROOT, env=office)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url), timeout_s=30)
        yield url
    finally:
        process.terminate()
        process.wait(15)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def slots_ready(url: str) -> Iterator[None]:
    """A slot for each version that goes on saying that it is ready."""
    over = threading.Event()
    with Queue(url) as queue:
        members = hold_ready(queue, "chat", *VERSIONS)

        def renew() -> None:
            while not over.wait(0.5):
                for member in members:
                    member.renew()

        keeper = threading.Thread(target=renew)
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()


def is_win(response: httpx.Response) -> bool:
    """Whether this call changed the route; every other answer must be one of a loser."""
    body = response.json()
    if response.status_code == 200:
        return bool(body["changed"])
    assert response.status_code == 409, response.text
    assert body["code"] in ("stale_generation", "nothing_to_roll_back_to"), body
    assert body["current"]["live"] in VERSIONS
    return False


def test_of_two_operators_one_wins_each_race_and_redis_ends_equal_to_the_database(
    office: dict[str, str], redis_url: str
) -> None:
    tokens = ask(office, "prepare")
    chance = random.Random(SEED)  # noqa: S311 (no secret)
    with ExitStack() as stack:
        stack.enter_context(slots_ready(redis_url))
        urls = [stack.enter_context(control_process(office)) for _ in tokens]
        operators = [
            stack.enter_context(
                httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30)
            )
            for url, token in zip(urls, tokens, strict=True)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        seen = operators[0].get(ENDPOINT).json()
        for race in range(NUM_RACES):
            others = [version for version in VERSIONS if version != seen["live"]]
            calls = [promotion(chance.choice(others), seen) for _ in operators]
            if race % 2:
                calls[chance.randrange(2)] = ("rollback", {"from": seen["live"]})
            start = threading.Barrier(2)
            answers = pool.map(send, operators, calls, [start, start])
            wins = [is_win(answer) for answer in answers]
            assert wins.count(True) == 1, (race, calls)
            generation = seen["generation"]
            seen = operators[race % 2].get(ENDPOINT).json()
            assert seen["generation"] == generation + 1
            assert seen["is_published"]
    told = ask(office, "tell")
    assert told["generations"] == list(range(1, NUM_RACES + 2))
    assert told == {
        "generations": told["generations"],
        "problem": "",
        "row": NUM_RACES + 1,
        "is_same": True,
    }


def promotion(version: str, seen: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A promote by somebody who decided on what they saw."""
    body = {"version": version, "reason": "race", "expected_generation": seen["generation"]}
    return "promote", body


def send(
    operator: httpx.Client, call: tuple[str, dict[str, Any]], start: threading.Barrier
) -> httpx.Response:
    what, body = call
    start.wait(10)
    return operator.post(f"{ENDPOINT}/{what}", json=body)
