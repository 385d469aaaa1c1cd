"""The checker is worth something only if it goes red: a clean history, and one mutant for each way to break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.faults.history import Further, Outcome, Record, Report, Timeline, check
from tests.inference.instant_engine import golden_text

OLD, NEW = "m/1", "m/2"


def golden(version: str, prompt: str, num_tokens: int, choice: int = 0) -> str:
    return golden_text(num_tokens + choice, voice=version, prompt=prompt, choice=choice)


def ok(number: int, *, version: str = OLD, generation: int = 1, at: float = 1.0) -> Record:
    """A whole answer between ``at`` and one second later."""
    prompt = f"count {number}"
    return Record(
        number,
        prompt,
        3,
        invoked_at=at,
        completed_at=at + 1,
        outcome=Outcome.OK,
        status=200,
        id=f"chatcmpl-{number}",
        version=version,
        generation=generation,
        text=golden(version, prompt, 3),
        finish_reason="length",
        is_done=True,
    )


REFUSED = Record(8, "count 8", 3, 6.0, 6.1, Outcome.REFUSED, status=429, retry_after="2")
FAILED = replace(
    ok(9), outcome=Outcome.FAILED, code="slot_lost", text="", finish_reason="", is_done=False
)
SECOND = Further(golden(OLD, "count 5", 3, 1), "length")
TWO = replace(ok(5), num_choices=2, further=(SECOND,))
# 0 before the change, 1 moved by it, 2 after it; one refused, one failed, one of two choices.
HISTORY = [
    ok(0),
    ok(1, version=NEW, at=9.5),
    ok(2, version=NEW, generation=2, at=12.0),
    REFUSED,
    FAILED,
    TWO,
]


def make_timeline() -> Timeline:
    timeline = Timeline(1, OLD)
    timeline.note(2, NEW, asked_at=10.0, answered_at=10.2)
    return timeline


def judge(records: Sequence[Record], **options: object) -> Report:
    given: dict[str, object] = {"num_sent": len(HISTORY), "timeline": make_timeline()}
    return check(records, golden=golden, **(given | options))  # type: ignore[arg-type]


def test_a_clean_history_is_clean_and_counted() -> None:
    report = judge(HISTORY)

    assert report.is_clean, report
    assert report.counts == {Outcome.OK: 4, Outcome.REFUSED: 1, Outcome.FAILED: 1}


def mutate(index: int, **changes: object) -> list[Record]:
    return [
        replace(record, **changes) if i == index else record  # type: ignore[arg-type]
        for i, record in enumerate(HISTORY)
    ]


MUTANTS: dict[str, tuple[Callable[[], list[Record]], str]] = {
    "a truncated stream said done": (
        lambda: mutate(0, text=golden(OLD, "count 0", 2)),
        "golden of",
    ),
    "an answer came twice in one stream": (
        lambda: mutate(0, text=HISTORY[0].text * 2),
        "golden of",
    ),
    "an answer of another prompt": (lambda: mutate(0, text=golden(OLD, "count 7", 3)), "golden of"),
    "the header names another version than answered": (lambda: mutate(0, version=NEW), "golden of"),
    "two versions in one answer": (
        lambda: mutate(0, text=golden(OLD, "count 0", 2) + golden(NEW, "count 0", 1)),
        "golden of",
    ),
    "no finish reason before [DONE]": (lambda: mutate(0, finish_reason=""), "finish_reason=''"),
    "no [DONE]": (lambda: mutate(0, is_done=False), "done=False"),
    "[DONE] after an error": (lambda: mutate(4, is_done=True), "[DONE] was sent after slot_lost"),
    "[DONE] after a cut": (
        lambda: mutate(4, outcome=Outcome.UNKNOWN, is_done=True, code=""),
        "[DONE] was sent after no end",
    ),
    "a cut without a word": (
        lambda: mutate(4, outcome=Outcome.UNKNOWN, code="ReadError"),
        "cut without a word",
    ),
    "a failed answer that began wrongly": (lambda: mutate(4, text="nonsense"), "began"),
    "a failure without a code": (lambda: mutate(4, code=""), "without a code"),
    "an answer without a version": (lambda: mutate(0, version=""), "without a version"),
    "one answered under the id of another": (lambda: mutate(0, id=HISTORY[1].id), "2 times"),
    "a choice without an end": (
        lambda: mutate(5, further=(replace(SECOND, finish_reason=""),)),
        "without the end of choice 1",
    ),
    "a choice that never came": (lambda: mutate(5, further=()), "without the end of choice 1"),
    "a choice that nobody asked for": (lambda: mutate(0, further=(SECOND,)), "2 choices of 1"),
    "a truncated choice": (
        lambda: mutate(5, further=(replace(SECOND, text=golden(OLD, "count 5", 2, 1)),)),
        "golden of",
    ),
    "two choices that say the same": (
        lambda: mutate(5, further=(replace(SECOND, text=TWO.text),)),
        "golden of",
    ),
    "a choice of a failed answer that began wrongly": (
        lambda: mutate(4, num_choices=2, further=(Further("nonsense"),)),
        "began",
    ),
    "a request with two outcomes": (lambda: [*HISTORY, HISTORY[0]], "2 outcomes"),
    "a request without outcome": (lambda: HISTORY[1:], "have an outcome"),
    "a refusal without Retry-After": (lambda: mutate(3, retry_after=""), "Retry-After"),
    "a refusal that asks to retry at once": (lambda: mutate(3, retry_after="0"), "Retry-After"),
    "a refusal with another status": (lambda: mutate(3, status=500), "status 500"),
    "served by a version before it was live": (
        lambda: mutate(1, version=NEW, completed_at=9.9),
        "not live",
    ),
    "moved back to a version that was live before": (
        lambda: mutate(2, version=OLD, text=golden(OLD, "count 2", 3)),
        "not live",
    ),
    "routed by a generation that was over": (
        lambda: mutate(0, invoked_at=11.0, completed_at=12.0),
        "not live",
    ),
    "routed by a generation that never was": (lambda: mutate(0, generation=7), "not live"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_goes_red(name: str) -> None:
    make, told = MUTANTS[name]

    report = judge(make())

    assert not report.is_clean
    assert told in str(report)


def test_a_cut_is_fine_when_the_gateway_itself_was_ended() -> None:
    records = mutate(4, outcome=Outcome.UNKNOWN, code="ReadError")

    assert judge(records, may_be_cut=True).is_clean
