"""What happened to every request of a load, and whether that may be: records, a timeline of routes, a checker.

The checker believes nothing that the system says of itself: a request is ok when the client has a whole answer, and the
answer is right when it equals the golden text of the version that its header names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus

import redis

REFUSALS = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
MAX_VIOLATIONS_TOLD = 10

# (version, prompt, number of tokens asked for, choice) -> the whole answer
Golden = Callable[[str, str, int, int], str]


class Outcome(StrEnum):
    """What a client knows when its request is over."""

    OK = "ok"  # a finish reason and [DONE], or a whole reply
    REFUSED = "refused"  # 429 or 503 before any token
    FAILED = "failed"  # any other visible error, before or within the answer
    UNKNOWN = "unknown"  # cut: neither an end nor an error


@dataclass(frozen=True, slots=True)
class Further:
    """A choice beside the first one."""

    text: str = ""
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One request as its client saw it; times are seconds of ``time.monotonic()``.

    It asked for ``num_choices``; ``text`` and ``finish_reason`` are the first one's. ``version`` and ``generation`` are those of the reply's header, empty where there was none.
    """

    number: int
    prompt: str
    num_tokens: int
    invoked_at: float
    completed_at: float
    outcome: Outcome
    first_at: float | None = None
    status: int = 0
    code: str = ""
    retry_after: str = ""
    id: str = ""
    version: str = ""
    generation: int = 0
    text: str = ""
    finish_reason: str = ""
    is_done: bool = False
    num_choices: int = 1
    further: tuple[Further, ...] = ()

    def choice(self, index: int) -> Further:
        """What came of a choice; nothing of one that never came."""
        if index == 0:
            return Further(self.text, self.finish_reason)
        return self.further[index - 1] if index <= len(self.further) else Further()


@dataclass(frozen=True, slots=True)
class Reign:
    """A version was live: from when its change was asked for, until the next change was answered."""

    generation: int
    version: str
    begun_at: float
    ended_at: float = float("inf")


class Timeline:
    """Which version was live when, from the replies of promote and rollback."""

    def __init__(self, generation: int, version: str) -> None:
        self._reigns = [Reign(generation, version, float("-inf"))]

    def note(self, generation: int, version: str, *, asked_at: float, answered_at: float) -> None:
        """A change made ``version`` live."""
        last = self._reigns[-1]
        self._reigns[-1] = Reign(last.generation, last.version, last.begun_at, answered_at)
        self._reigns.append(Reign(generation, version, asked_at))

    def may_serve(self, record: Record) -> bool:
        """Whether its version was live when the request was routed, or when a later change moved it."""
        routed = [each for each in self._reigns if each.generation == record.generation]
        if not routed or not (
            routed[0].begun_at <= record.completed_at and routed[0].ended_at >= record.invoked_at
        ):
            return False
        return any(
            each.version == record.version
            and each.generation >= record.generation
            and each.begun_at <= record.completed_at
            for each in self._reigns
        )


@dataclass(slots=True, repr=False)
class Report:
    """How many requests ended how, and every broken promise as a sentence."""

    counts: Counter[Outcome] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        counts = ", ".join(f"{self.counts[each]} {each}" for each in Outcome)
        told = self.violations[:MAX_VIOLATIONS_TOLD]
        return "\n".join([counts, f"{len(self.violations)} violations", *told])

    @property
    def is_clean(self) -> bool:
        """Whether every promise held."""
        return not self.violations


def check(
    records: Sequence[Record],
    *,
    num_sent: int,
    golden: Golden,
    timeline: Timeline | None = None,
    may_be_cut: bool = False,
) -> Report:
    """Judge a history. ``may_be_cut``: the gateway itself was ended, so a connection may break without a word."""
    report = Report(Counter(record.outcome for record in records))
    report.violations += _check_completeness(records, num_sent)
    for record in records:
        problems = [
            *_check_end(record, may_be_cut=may_be_cut),
            *_check_choices(record),
            *_check_text(record, golden),
        ]
        if timeline is not None and record.version and not timeline.may_serve(record):
            problems.append(f"served by {record.version}, not live at {record.generation} or later")
        report.violations += [f"request {record.number}: {problem}" for problem in problems]
    return report


def _check_completeness(records: Sequence[Record], num_sent: int) -> Iterator[str]:
    if len(records) != num_sent:
        yield f"{num_sent} were sent, and {len(records)} have an outcome"
    numbers = Counter(record.number for record in records)
    ids = Counter(record.id for record in records if record.id)
    yield from (f"request {number} has {n} outcomes" for number, n in numbers.items() if n > 1)
    yield from (f"id {each} was answered {n} times" for each, n in ids.items() if n > 1)


def _check_end(record: Record, *, may_be_cut: bool) -> Iterator[str]:
    if record.outcome is Outcome.OK and not (record.finish_reason and record.is_done):
        yield f"said ok with finish_reason={record.finish_reason!r} done={record.is_done}"
    if record.outcome is not Outcome.OK and record.is_done:
        yield f"[DONE] was sent after {record.code or 'no end'}"
    if record.outcome is Outcome.UNKNOWN and not may_be_cut:
        yield f"cut without a word after {len(record.text)} characters: {record.code}"
    if record.outcome is Outcome.REFUSED:
        if record.status not in REFUSALS:
            yield f"refused with status {record.status}"
        if not record.retry_after.isdigit() or int(record.retry_after) < 1:
            yield f"refused with Retry-After={record.retry_after!r}"
    if record.outcome is Outcome.FAILED and not record.code:
        yield "failed without a code"


def _check_choices(record: Record) -> Iterator[str]:
    """An answer that is ok has as many ends as it was asked choices for."""
    if record.outcome is not Outcome.OK:
        return
    if len(record.further) > record.num_choices - 1:
        yield f"{1 + len(record.further)} choices of {record.num_choices}"
    for index in range(1, record.num_choices):
        if not record.choice(index).finish_reason:
            yield f"said ok without the end of choice {index}"


def _check_text(record: Record, golden: Golden) -> Iterator[str]:
    """A whole answer equals its golden one in each choice, and any other is a beginning of it."""
    if not record.version:
        if record.text:
            yield "an answer without a version"
        return
    for index in range(record.num_choices):
        text = record.choice(index).text
        expected = golden(record.version, record.prompt, record.num_tokens, index)
        told = f"golden of {record.version} is {_shorten(expected)}"
        if record.outcome is Outcome.OK and text != expected:
            yield f"answered {_shorten(text)}, {told}"
        elif not expected.startswith(text):
            yield f"began {_shorten(text)}, {told}"


def find_leftovers(connection: redis.Redis) -> list[str]:
    """What a quiet system must not hold: bodies, entries, deliveries."""
    left = [f"body {key}" for key in connection.scan_iter("req:*", count=1_000)]
    for key in connection.scan_iter("q:*", count=1_000):
        if length := connection.xlen(key):
            left.append(f"{length} entries in {key}")
        pending = sum(group["pending"] for group in connection.xinfo_groups(key))
        left += [f"{pending} pending in {key}"] if pending else []
    return left


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
