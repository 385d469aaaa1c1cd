"""A rollout as an engineer and the callers see it: started by REST, fed with questions, read back with its reasons."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import httpx

from inference.queue import Queue
from tests.faults.instance import ApiRefused, Instance
from tests.flows.questions import Question
from tests.inference.slot_process import ROOT, wait_until

# It writes a line per request, which would bury a failed test's report.
logging.getLogger("httpx").setLevel(logging.WARNING)

OFFICE = "from tests.flows.rollout_office import main; main()"
TIMEOUT_S = 120.0
# A version keeps 32 copies at most, and none is made while more than 8 requests wait: nobody is to be skipped here.
NUM_IN_A_ROW, NUM_AT_ONCE = 24, 6


class Office:
    """The process that counts at once what came (``rollout_office``)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, do: str, rollout: str, **values: Any) -> dict[str, Any]:
        """One command, and what it says."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ValueError("The office has no pipes.")
        stdin.write(json.dumps({"do": do, "rollout": rollout, **values}) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise AssertionError(f"The office failed at {do!r}; its error is above.")
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def open_office(instance: Instance) -> Iterator[Office]:
    """The office of an instance, until the block ends."""
    command = [sys.executable, "manage.py", "shell", "--no-imports", "-c", OFFICE]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=instance.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Office(process)
        finally:
            process.kill()


class RolloutRun:
    """One rollout on the demo's endpoint."""

    def __init__(self, instance: Instance, office: Office, key: str) -> None:
        self.instance = instance
        self.key = key
        self.num_asked = 0
        self._office = office

    @classmethod
    def start(
        cls, instance: Instance, office: Office, candidate: str, document: Mapping[str, Any]
    ) -> RolloutRun:
        """Save the policy, and start the rollout under it."""
        policy = instance.call("POST", "policies", {"name": "flow", "document": document})
        body = {
            "endpoint": instance.endpoint_name,
            "candidate": candidate,
            "policy": policy["id"],
            "reason": "a test",
        }
        return cls(instance, office, instance.call("POST", "rollouts", body)["id"])

    def read(self, what: str = "") -> Any:
        """The rollout, or one of its parts."""
        return self.instance.call("GET", f"rollouts/{self.key}" + (f"/{what}" if what else ""))

    def act(self, action: str, **body: Any) -> Any:
        """Do something to it."""
        return self.instance.call("POST", f"rollouts/{self.key}/{action}", body)

    def wait_for(self, is_true: Callable[[dict[str, Any]], bool], *, timeout_s: float = 60) -> Any:
        """The rollout, once it is as wished; a control process that is busy is asked again."""
        seen: dict[str, Any] = {}

        def holds() -> bool:
            try:
                seen.update(self.read())
            except (httpx.TransportError, ApiRefused):
                return False
            return is_true(seen)

        try:
            wait_until(holds, timeout_s=timeout_s)
        except TimeoutError as error:
            told = {name: seen.get(name) for name in ("state", "step_index", "why", "verdict")}
            tail = self.instance.tail_of_logs()
            raise TimeoutError(f"{error} Last seen: {told}\n{tail}") from error
        return seen

    def wait_for_step(self, index: int) -> None:
        """Return when the step has begun, and the gateways know its shares."""
        state = self.wait_for(lambda row: row["step_index"] == index)
        wanted = (state["canary_bp"], state["shadow_bp"], state["score_bp"])

        def is_routed() -> bool:
            with Queue(self.instance.redis_url) as queue:
                route = queue.read_route(self.instance.endpoint_name)
            return route is not None and wanted == (
                *(route.canary_bp, route.shadow_bp, route.score_bp),
            )

        wait_until(is_routed)

    def wait_for_state(self, state: str, *, timeout_s: float = 60) -> Any:
        """The rollout in ``state``."""
        return self.wait_for(lambda row: row["state"] == state, timeout_s=timeout_s)

    def ask(self, questions: Sequence[Question], **options: Any) -> list[httpx.Response]:
        """Send the questions through the gateway, some at once, each by a user of its own; the replies in order.

        After some of them the copies that were made of them have their turn.
        """
        self.num_asked += len(questions)
        replies: list[httpx.Response] = []
        for start in range(0, len(questions), NUM_IN_A_ROW):
            some = questions[start : start + NUM_IN_A_ROW]
            replies += asyncio.run(ask(self.instance, some, **options))
            wait_until(lambda: count_copies(self.instance) == 0, timeout_s=TIMEOUT_S)
        return replies

    def count(self) -> dict[str, Any]:
        """Have everything that was asked so far counted now."""
        return self._office.ask("count", self.key, num_requests=self.num_asked)

    def ask_office(self, what: str) -> dict[str, Any]:
        """What the office knows of it: ``pool`` or ``tell``."""
        return self._office.ask(what, self.key)

    def gates(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Each gate as the last look saw it, by metric and segment."""
        rows = self.read("segments")["results"]
        return {(row["metric"], row["name"]): row for row in rows}

    def events(self) -> list[dict[str, Any]]:
        """What happened, the oldest first."""
        rows = self.read("timeline")["results"]
        return [row for row in reversed(rows) if row["kind"] == "event"]


def count_copies(instance: Instance) -> int:
    """How many copies wait or run."""
    with instance.redis() as connection:
        lanes = list(connection.scan_iter("low:*", count=1_000))
        return sum(cast("int", connection.xlen(lane)) for lane in lanes)


async def ask(
    instance: Instance, questions: Sequence[Question], *, max_tokens: int = 12
) -> list[httpx.Response]:
    """The replies to greedy chat requests."""
    places = asyncio.Semaphore(NUM_AT_ONCE)
    async with httpx.AsyncClient(
        base_url=instance.run["gateway_url"],
        headers={"Authorization": f"Bearer {instance.run['api_key']}"},
        timeout=TIMEOUT_S,
    ) as client:

        async def send(question: Question) -> httpx.Response:
            body = {
                "model": instance.endpoint_name,
                "messages": [{"role": "user", "content": question.text}],
                "max_tokens": max_tokens,
                "temperature": 0,
                "user": question.text,
                "metadata": question.metadata,
            }
            async with places:
                return await client.post("/v1/chat/completions", json=body)

        return list(await asyncio.gather(*map(send, questions)))
