"""The gateway as it is run: its own process and settings, a real Redis, a real engine slot with an instant engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from controlplane.access.cache import KeyRecord, digest_key
from inference.protocol import RequestRecord, Resident, Route
from inference.queue import Queue
from tests.controlplane.gateway.fakes import ENDPOINT, KEY, VERSION
from tests.inference.instant_engine import golden_text
from tests.inference.slot_process import SlotProcess, wait_until
from tests.redis_server import RedisServer, free_port

ROOT = Path(__file__).parents[3]
MESSAGES: Any = [{"role": "user", "content": "Count."}]
STEP_S = 0.02

pytestmark = pytest.mark.slow


@dataclass(slots=True)
class System:
    """Gateway, Redis and slot, each a process."""

    url: str
    queue: Queue
    redis: RedisServer
    slot: SlotProcess
    gateway: subprocess.Popen[bytes]

    def sdk(self) -> OpenAI:
        """The OpenAI package with a valid key."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=20.0)

    def record(self) -> RequestRecord:
        """The next line of the request log."""
        found: list[RequestRecord] = []

        def read() -> bool:
            entries = self.queue.read_log("tests", 1)
            self.queue.ack_log([entry.entry_id for entry in entries])
            found.extend(
                entry.record for entry in entries if isinstance(entry.record, RequestRecord)
            )
            return bool(found)

        wait_until(read)
        return found[0]


@pytest.fixture(scope="module")
def system(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Everything up and ready."""
    redis_server.flush()
    logs = tmp_path_factory.mktemp("gateway")
    queue = Queue(redis_server.url)
    queue.put_keys({"tests1": KeyRecord(digest_key(KEY), "tests").to_json()})
    queue.apply_route(Route(ENDPOINT, "i1", 7, live=VERSION, store_texts=True))
    queue.publish_desired([Resident(ENDPOINT, VERSION, artifact="any")])
    port = free_port()
    with (
        SlotProcess(
            redis_server.url, "slot-1", logs / "slot.log", TATKAL_TEST_STEP_S=str(STEP_S)
        ) as slot,
        run_gateway(redis_server.url, port, logs / "gateway.log") as gateway,
    ):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _is_ready(url), timeout_s=30)
        yield System(url, queue, redis_server, slot, gateway)
    queue.close()


@contextmanager
def run_gateway(redis_url: str, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway started as the supervisor does; it is killed in the end."""
    command = (
        f"-m uvicorn controlplane.asgi:application --port {port} --lifespan on --no-access-log "
        "--http controlplane.connection:Connection --timeout-graceful-shutdown 1"
    )
    env = os.environ | {
        "DJANGO_SETTINGS_MODULE": "controlplane.settings.gateway",
        "REDIS_URL": redis_url,
        "TATKAL_SECRET_KEY": "tests",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command.split()], cwd=ROOT, env=env, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def test_an_answer_comes_from_the_engine_with_its_counts(system: System) -> None:
    with system.sdk() as client:
        raw = client.chat.completions.with_raw_response.create(
            model=ENDPOINT, messages=MESSAGES, max_tokens=5
        )
    answer = raw.parse()

    assert answer.choices[0].message.content == golden_text(5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 5)
    assert raw.headers["x-model-version"] == VERSION
    assert raw.headers["x-tatkal-generation"] == "7"
    record = system.record()
    assert (record.outcome, record.completion) == ("ok", golden_text(5))


def test_a_stream_arrives_as_it_is_made(system: System) -> None:
    with (
        system.sdk() as client,
        client.chat.completions.create(
            model=ENDPOINT,
            messages=MESSAGES,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream,
    ):
        arrived = [(time.monotonic(), chunk) for chunk in stream]

    choices = [chunk.choices[0] for _, chunk in arrived if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == golden_text(30)
    assert choices[-1].finish_reason == "length"
    assert arrived[-1][1].usage is not None
    assert arrived[-1][1].usage.completion_tokens == 30
    assert arrived[-1][0] - arrived[0][0] > 10 * STEP_S, "The stream came in one piece."
    assert system.record().streamed


def test_a_refusal_of_the_slot_is_an_http_status(system: System) -> None:
    with system.sdk() as client, pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=ENDPOINT, prompt="too long", stream=True)

    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    assert system.record().outcome == "context_length_exceeded"


def test_a_failure_in_the_middle_is_raised_and_recorded(system: System) -> None:
    with (
        system.sdk() as client,
        client.completions.create(model=ENDPOINT, prompt="nan", stream=True) as stream,
        pytest.raises(openai.APIError) as raised,
    ):
        list(stream)

    assert raised.value.code == "numerical_error"
    assert system.record().outcome == "numerical_error"


def test_a_client_that_leaves_frees_the_slot(system: System) -> None:
    with system.sdk() as client:
        stream = client.chat.completions.create(
            model=ENDPOINT, messages=MESSAGES, max_tokens=5000, stream=True
        )
        next(iter(stream))
        stream.close()
    record = system.record()
    assert (record.outcome, record.completion_tokens) == ("cancelled", 0)

    # The engine would be busy for 100 s; a new request must find a slot that does not step for the old one.
    with system.sdk() as client:
        answer = client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert system.record().outcome == "ok"


def test_a_revoked_key_stops_within_two_seconds(system: System) -> None:
    revoked = KeyRecord(digest_key(KEY), "tests", revoked=True)
    system.queue.put_keys({"tests1": revoked.to_json()})
    try:
        wait_until(lambda: _status(system.url) == 401, timeout_s=3)
    finally:
        system.queue.put_keys({"tests1": KeyRecord(digest_key(KEY), "tests").to_json()})
    wait_until(lambda: _status(system.url) == 200, timeout_s=3)


def test_without_redis_the_answer_is_503_and_with_it_200_again(system: System) -> None:
    system.redis.kill()
    try:
        wait_until(lambda: httpx.get(f"{system.url}/readyz").status_code == 503, timeout_s=10)
        assert _status(system.url) == 503
        assert httpx.get(f"{system.url}/livez").status_code == 200
    finally:
        system.redis.start()
    wait_until(lambda: _is_ready(system.url), timeout_s=20)
    assert _status(system.url) == 200


def test_a_stream_that_outlasts_the_shutdown_ends_with_an_error_event(system: System) -> None:
    with system.sdk() as client:
        stream = client.chat.completions.create(
            model=ENDPOINT, messages=MESSAGES, max_tokens=5000, stream=True
        )
        next(iter(stream))
        system.gateway.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError) as raised:
            list(stream)

    assert raised.value.code == "server_shutting_down"
    assert system.gateway.wait(10) in (0, -signal.SIGTERM)
    assert system.record().outcome == "server_shutting_down"


def _status(url: str) -> int:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.get(f"{url}/v1/models", headers=headers, timeout=10).status_code


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
