"""An open-loop load on a gateway: requests are sent when they are due, whatever became of the ones before.

Every request is bounded in time and ends in exactly one ``Record``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Self

import httpx

from tests.faults.history import REFUSALS, Further, Outcome, Record

# It writes a line per request, which would bury a failed test's report.
logging.getLogger("httpx").setLevel(logging.WARNING)

TIMEOUT_S = 45.0
MAX_CONNECTIONS = 400


class Load:
    """Requests to one endpoint; leave the context when all have ended."""

    def __init__(self, run: Mapping[str, Any], *, num_tokens: int = 16) -> None:
        """``run`` is the content of ``run.json``."""
        self.records: list[Record] = []
        self.num_sent = 0
        self._endpoint = run["endpoint"]
        self._num_tokens = num_tokens
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Record]] = set()
        self._client = httpx.AsyncClient(
            base_url=run["gateway_url"],
            headers={"Authorization": f"Bearer {run['api_key']}"},
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.__aexit__(None, None, None)

    @property
    def num_open(self) -> int:
        """How many have no outcome yet."""
        return len(self._tasks)

    def send(
        self, words: str = "count", *, num_tokens: int | None = None, n: int = 1
    ) -> asyncio.Task[Record]:
        """Send one request for ``n`` choices now, with a prompt that no other has."""
        number = next(self._numbers)
        self.num_sent += 1
        sending = self._send(number, f"{words} {number}", num_tokens or self._num_tokens, n)
        task = asyncio.create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self, *, rate: float, duration_s: float, burst: int = 1) -> None:
        """Send ``rate`` requests a second, ``burst`` of them at a time, at random moments (Poisson)."""
        moments = random.Random(self.num_sent)  # noqa: S311  # a load, no secret
        started_at, due_s = time.monotonic(), 0.0
        while (due_s := due_s + moments.expovariate(rate / burst)) < duration_s:
            await asyncio.sleep(max(0.0, started_at + due_s - time.monotonic()))
            for _ in range(burst):
                self.send()

    async def end(self) -> list[Record]:
        """Wait for every outcome; all records, in the order in which they ended."""
        while self._tasks:
            await asyncio.gather(*self._tasks)
        return self.records

    async def _send(self, number: int, prompt: str, num_tokens: int, n: int) -> Record:
        reading = Reading(number, prompt, num_tokens, n)
        body = {
            "model": self._endpoint,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": num_tokens,
            "n": n,
            "temperature": 0,
            "stream": True,
        }
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._client.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                await reading.read(response)
        except (httpx.HTTPError, TimeoutError) as error:
            reading.cut(error)
        record = reading.record()
        self.records.append(record)
        return record


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a closed loop reached."""

    requests_per_s: float
    num_requests: int


async def measure_capacity(
    run: Mapping[str, Any], *, num_tokens: int, concurrency: int, duration_s: float
) -> Capacity:
    """Whole answers per second with ``concurrency`` clients that ask again as soon as they are answered."""
    async with Load(run, num_tokens=num_tokens) as load:
        started_at = time.monotonic()

        async def ask() -> int:
            num_ok = 0
            while time.monotonic() - started_at < duration_s:
                num_ok += (await load.send()).outcome is Outcome.OK
            return num_ok

        num_ok = sum(await asyncio.gather(*(ask() for _ in range(concurrency))))
        return Capacity(num_ok / (time.monotonic() - started_at), num_ok)


class Reading:
    """One reply, as far as it came."""

    def __init__(self, number: int, prompt: str, num_tokens: int, n: int = 1) -> None:
        now = time.monotonic()
        self._record = Record(number, prompt, num_tokens, now, now, Outcome.UNKNOWN, num_choices=n)
        self._choices: dict[int, Further] = {}
        self._has_error = False

    async def read(self, response: httpx.Response) -> None:
        """Read to the end of the stream or of the error."""
        headers = response.headers
        self._note(
            status=response.status_code,
            retry_after=headers.get("retry-after", ""),
            first_at=time.monotonic(),
        )
        if response.status_code != HTTPStatus.OK:
            self._read_error(await response.aread())
            return
        self._note(
            version=headers["x-model-version"], generation=int(headers["x-tatkal-generation"])
        )
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                self._read_event(line.removeprefix("data: "))

    def cut(self, error: Exception) -> None:
        """The connection broke, or the client's patience ended."""
        if not self._record.code:
            self._note(code=type(error).__name__)

    def record(self) -> Record:
        """What it came to."""
        first, *further = (
            self._choices.get(index, Further())
            for index in range(max(self._choices, default=0) + 1)
        )
        self._note(text=first.text, finish_reason=first.finish_reason, further=tuple(further))
        self._note(outcome=self._outcome(), completed_at=time.monotonic())
        return self._record

    def _note(self, **fields: Any) -> None:
        self._record = replace(self._record, **fields)

    def _read_error(self, body: bytes) -> None:
        self._has_error = True
        with suppress(ValueError, KeyError, TypeError):
            self._note(code=json.loads(body)["error"]["code"])

    def _read_event(self, data: str) -> None:
        if data == "[DONE]":
            self._note(is_done=True)
            return
        event = json.loads(data)
        if error := event.get("error"):
            self._has_error = True
            self._note(code=error["code"])
            return
        if not self._record.id:
            self._note(id=event["id"])
        for choice in event["choices"]:
            before = self._choices.get(choice["index"], Further())
            self._choices[choice["index"]] = Further(
                before.text + (choice["delta"].get("content") or ""),
                choice["finish_reason"] or before.finish_reason,
            )

    def _outcome(self) -> Outcome:
        """As careless a client as there is: either sign of an end is one, and the checker asks for both."""
        if self._record.status in REFUSALS:
            return Outcome.REFUSED
        if self._has_error:
            return Outcome.FAILED
        if self._record.finish_reason or self._record.is_done:
            return Outcome.OK
        return Outcome.UNKNOWN
