"""Requests with a time of sending, an engine that answers them, and what a caller would have measured.

Whoever drives the engine is in its thread, between the steps: a request that is due in the middle of a step waits for
its end, and its TTFT runs from when it was due.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from inference.engine.request import StepOutput
from inference.protocol import SamplingParams


class Engine(Protocol):
    """What is driven."""

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do."""

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        """Accept a request."""

    def step(self) -> list[StepOutput]:
        """What one step adds to each request."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for exactly ``num_tokens`` tokens, sent ``due_s`` after the start."""

    prompt: tuple[int, ...]
    num_tokens: int
    due_s: float = 0.0


@dataclass(slots=True)
class Answer:
    """The tokens of one request, and when its first and last one came, in seconds since the start."""

    sent_s: float
    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """From send to first token."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """(latency - TTFT) / (n - 1); 0 for one token."""
        return (self.last_s - self.first_s) / max(len(self.token_ids) - 1, 1)

    def add(self, token_id: int, at_s: float) -> None:
        """One more token."""
        if not self.token_ids:
            self.first_s = at_s
        self.token_ids.append(token_id)
        self.last_s = at_s


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller puts up with."""

    ttft_s: float
    tpot_s: float

    def hold_for(self, answer: Answer) -> bool:
        """Whether both limits were kept."""
        return answer.ttft_s <= self.ttft_s and answer.tpot_s <= self.tpot_s


def tokens_per_s(answers: Sequence[Answer]) -> float:
    """All tokens over the time from the first send to the last token."""
    return sum(len(each.token_ids) for each in answers) / _span_s(answers)


def goodput(answers: Sequence[Answer], limits: Limits) -> float:
    """Requests per second that kept ``limits``."""
    return sum(limits.hold_for(each) for each in answers) / _span_s(answers)


def _span_s(answers: Sequence[Answer]) -> float:
    return max(each.last_s for each in answers) - min(each.sent_s for each in answers)


def arrive_at_random(asked: Sequence[Asked], rate: float, *, seed: int) -> list[Asked]:
    """The same requests as a Poisson process of ``rate`` a second: an open loop, whatever the engine does."""
    arrivals = random.Random(seed)  # noqa: S311 (a load, no secret)
    due_s = 0.0
    spread = []
    for each in asked:
        due_s += arrivals.expovariate(rate)
        spread.append(replace(each, due_s=due_s))
    return spread


def drive(engine: Engine, asked: Sequence[Asked]) -> list[Answer]:
    """Send each request when it is due, step while there is work, and return the answers in order.

    Raises:
        RuntimeError: a request failed.
    """
    answers = {f"bench-{index}": Answer(each.due_s) for index, each in enumerate(asked)}
    waiting = sorted(zip(answers, asked, strict=True), key=lambda pair: pair[1].due_s)
    started_at = time.perf_counter()
    while waiting or engine.has_unfinished:
        now_s = time.perf_counter() - started_at
        while waiting and waiting[0][1].due_s <= now_s:
            _add(engine, *waiting.pop(0))
        if not engine.has_unfinished:
            time.sleep(max(waiting[0][1].due_s - now_s, 0.0))
            continue
        outputs = engine.step()
        now_s = time.perf_counter() - started_at
        for output in outputs:
            if output.failure is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.failure.message}")
            answers[output.request_id].add(output.token_id, now_s)
    return list(answers.values())


def drive_in_waves(engine: Engine, asked: Sequence[Asked], *, size: int) -> list[Answer]:
    """Static batching: ``size`` requests are begun together, and the next ones when the longest of them has ended."""
    answers: list[Answer] = []
    before_s = 0.0
    for first in range(0, len(asked), size):
        wave = drive(engine, asked[first : first + size])
        for answer in wave:  # all of them were sent at the start
            answer.first_s += before_s
            answer.last_s += before_s
        before_s = max(answer.last_s for answer in wave)
        answers += wave
    return answers


def _add(engine: Engine, request_id: str, asked: Asked) -> None:
    sampling = SamplingParams(max_tokens=asked.num_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request(request_id, asked.prompt, sampling)
