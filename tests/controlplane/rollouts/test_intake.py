"""Halves in the stream become pairs: each once, classified alike, and with texts only where they may be stored."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis

from controlplane.monitoring.models import FlaggedTerm, RequestLog
from controlplane.rollouts import intake as intake_module
from controlplane.rollouts.intake import intake_answers
from controlplane.rollouts.pairs import Pair
from drift.classifiers import CASES, ClassifierBroken, RulesV1, SelfTest
from inference.protocol import Answer, GenerateRequest, Route, SamplingParams, Score
from inference.queue import Lane, Queue
from tests.factories import NOW, hold_ready

pytestmark = pytest.mark.django_db

PROMPT = "What is the refund policy for my order?"
ROUTE = Route(
    "chat", "a", 1, "tiny/1", candidate="tiny/2", rollout="ro", shadow_bp=10_000, score_bp=10_000
)
Put = Callable[..., Answer]


@pytest.fixture
def link(redis_url: str) -> Any:
    with redis.Redis.from_url(redis_url, decode_responses=True, protocol=2) as link:
        yield link


@pytest.fixture
def put(link: Any) -> Put:
    """Writes one half as gateways and slots do."""

    def write(arm: str = "live", copy_of: str = "r1", **fields: Any) -> Answer:
        version = "tiny/1" if arm in ("live", "self") else "tiny/2"
        values: dict[str, Any] = {
            "copy_of": copy_of,
            "arm": arm,
            "endpoint": "chat",
            "version": version,
            "generation": 1,
            "rollout": "ro",
            "fingerprint": f"fp-{version}",
            "outcome": "ok",
            "at": NOW.timestamp(),
            "text": "Five days.",
            "finish_reason": "stop",
            "prompt_tokens": 9,
            "completion_tokens": 3,
            "engine_s": 0.25,
            "total_s": 0.5,
        }
        if arm == "live":
            request = GenerateRequest(
                copy_of, "chat", SamplingParams(), 30.0, prompt=PROMPT, key_id="k1", user="u1"
            )
            values |= {"awaits": ("shadow",), "request": request.to_json()}
        answer = Answer(**values | fields)
        link.xadd("answers", {"answer": answer.to_json()})
        return answer

    return write


def intake(queue: Queue, *, after_s: float = 1.0, scorer: str = "") -> int:
    return intake_answers(queue=queue, now=NOW + timedelta(seconds=after_s), scorer=scorer)


@pytest.mark.parametrize("order", [("live", "shadow"), ("shadow", "live")])
def test_two_halves_become_a_pair_in_any_order(
    queue: Queue, link: Any, put: Put, order: tuple[str, str]
) -> None:
    put(order[0])
    assert intake(queue) == 0
    put(order[1])

    assert intake(queue) == 1

    pair = Pair.objects.get()
    assert (pair.rollout, pair.request_id, pair.arm) == ("ro", "r1", "shadow")
    assert (pair.state, pair.differs, pair.similarity) == ("compared", False, 1.0)
    assert (pair.incumbent, pair.candidate) == ("tiny/1", "tiny/2")
    assert (pair.candidate_fingerprint, pair.candidate_outcome) == ("fp-tiny/2", "ok")
    assert (pair.prompt_tokens, pair.incumbent_tokens, pair.candidate_tokens) == (9, 3, 3)
    assert (pair.candidate_engine_s, pair.candidate_total_s) == (0.25, 0.5)
    assert pair.segments == {"lang": "en", "length_band": "under 200"}
    assert (pair.user, pair.at) == ("u1", NOW)
    assert pair.classifier == f"rules-v1/{RulesV1().version}"
    assert link.xlen("answers") == 0


def test_texts_are_stored_only_where_they_may_be(queue: Queue, put: Put) -> None:
    for name, is_stored in (("no", False), ("yes", True)):
        put(copy_of=name, store_texts=is_stored)
        put("shadow", name, text="Never\x00.")
    intake(queue)

    texts = {
        pair.request_id: (pair.prompt, pair.incumbent_text, pair.candidate_text)
        for pair in Pair.objects.all()
    }
    assert texts == {"no": (None, None, None), "yes": (PROMPT, "Five days.", "Never.")}


def test_both_answers_are_flagged_by_the_same_classifier(queue: Queue, put: Put) -> None:
    FlaggedTerm.objects.create(term="never ever")
    put(text="I'm sorry, but I can't help with that.")
    put("shadow", text="Never ever: call +91 98765 43210.", finish_reason="length")
    intake(queue)

    pair = Pair.objects.get()
    assert pair.incumbent_flags == ["refusal"]
    assert pair.candidate_flags == ["pii", "term", "truncated"]
    assert pair.differs is True
    assert pair.classifier == f"rules-v1/{RulesV1(['never ever']).version}"
    assert Pair.objects.disagreeing().get() == pair


def test_a_failure_is_a_failure_and_a_drop_is_nothing(queue: Queue, put: Put) -> None:
    for name in ("failed", "dropped", "left"):
        put(copy_of=name, outcome="cancelled" if name == "left" else "ok")
    put("shadow", "failed", outcome="deadline_exceeded", text="Fiv", finish_reason="")
    put("shadow", "dropped", outcome="dropped", dropped="preempted")
    put("shadow", "left")

    assert intake(queue) == 3

    found = {row.request_id: (row.state, row.reason) for row in Pair.objects.all()}
    assert found == {
        "failed": ("failed", "deadline_exceeded"),
        "dropped": ("unobserved", "preempted"),
        "left": ("unobserved", "cancelled"),
    }
    assert Pair.objects.get(request_id="dropped").candidate_outcome == ""
    assert [row.request_id for row in Pair.objects.observed()] == ["failed"]


def test_a_copy_that_never_answers_is_judged_by_how_far_it_came(
    queue: Queue, link: Any, put: Put
) -> None:
    queue.apply_route(ROUTE)
    hold_ready(queue, "chat", "tiny/1", "tiny/2")
    names = ("dispatched", "waiting", "gone")
    for name in names:
        put(copy_of=name, awaits=("golden",))
        body = GenerateRequest(name, "chat", SamplingParams(), 30.0, prompt=PROMPT)
        if name != "gone":
            queue.enqueue_copy(body, "tiny/2", arm="golden")
    queue.take_copies(Lane("chat", "tiny/2"), "dead.a", 1, is_idle=False)

    assert intake(queue, after_s=100) == 0
    assert intake(queue, after_s=106) == 3

    found = {row.request_id: (row.state, row.reason) for row in Pair.objects.all()}
    assert found == {
        "dispatched": ("failed", "slot_lost"),
        "waiting": ("unobserved", "late"),
        "gone": ("unobserved", "lost"),
    }
    assert (link.xlen("answers"), link.xlen("low:chat:tiny/2")) == (0, 0)


def test_a_request_is_forgotten_when_its_last_arm_is_known(
    queue: Queue, link: Any, put: Put
) -> None:
    put(awaits=("shadow", "self"))
    put("shadow")
    assert intake(queue) == 1
    assert link.xlen("answers") == 1
    put("self", text="Six days.")
    assert intake(queue) == 1

    assert {pair.arm: pair.differs for pair in Pair.objects.all()} == {
        "shadow": False,
        "self": True,
    }
    assert Pair.objects.of_arm("self").difference_rate() == (1, 1)
    assert link.xlen("answers") == 0


def test_reading_the_stream_again_changes_nothing(
    queue: Queue, link: Any, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(awaits=("shadow", "self"))
    put("shadow")
    with monkeypatch.context() as crash:
        crash.setattr(queue, "delete_answers", lambda ids: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            intake(queue)
    stored = Pair.objects.values().get()
    put("shadow", text="Written twice, by a slot that was told nothing.")

    assert intake(queue) == 0

    assert Pair.objects.values().get() == stored
    assert link.xlen("answers") == 1  # the request still waits for its other arm


def test_another_worker_that_was_faster_is_no_error(
    queue: Queue, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put()
    put("shadow")
    monkeypatch.setattr(intake_module, "_stored", lambda everything: {})
    halves = intake_module.collect(queue)
    intake(queue)
    monkeypatch.setattr(intake_module, "collect", lambda queue: halves)

    intake(queue)

    assert Pair.objects.count() == 1


def test_golden_replays_are_left_to_whoever_asked(queue: Queue, link: Any, put: Put) -> None:
    put("golden")
    assert intake(queue) == 0
    assert link.xlen("answers") == 1


def test_copies_without_their_request_are_dropped_and_counted(
    queue: Queue, link: Any, put: Put
) -> None:
    put("shadow")
    intake(queue, after_s=600)
    assert link.xlen("answers") == 1
    intake(queue, after_s=700)
    assert link.xlen("answers") == 0
    assert queue.read_skips("chat", "ro") == {"shadow": {"no_incumbent": 1}}


def test_the_candidate_scores_the_answer_once_it_is_known(queue: Queue, put: Put) -> None:
    queue.apply_route(ROUTE)
    hold_ready(queue, "chat", "tiny/1", "tiny/2")
    put(awaits=("score",))
    assert [intake(queue), intake(queue)] == [0, 0]

    taken, _ = queue.take_copies(Lane("chat", "tiny/2"), "slot.a", 9, is_idle=False)
    (body,) = [each.body for each in taken]
    assert body is not None
    request = GenerateRequest.from_json(body)
    assert (request.score_text, request.prompt) == ("Five days.", PROMPT)

    put("score", text="", score=Score((-0.5, -1.0, -1.5), 2))
    assert intake(queue) == 1
    pair = Pair.objects.get()
    assert (pair.state, pair.mean_logprob, pair.differs) == ("compared", -1.0, None)
    assert pair.agreement == pytest.approx(2 / 3)
    assert pair.candidate_flags == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": ""}, "nothing_to_score"),
        ({"outcome": "generation_failed"}, "nothing_to_score"),
        ({"rollout": "over"}, "route_changed"),
        ({}, "not_ready"),
    ],
)
def test_what_cannot_be_scored_tells_nothing(
    queue: Queue, put: Put, fields: dict[str, Any], reason: str
) -> None:
    queue.apply_route(ROUTE)
    put(awaits=("score",), **fields)

    assert intake(queue) == 1

    pair = Pair.objects.get()
    assert (pair.state, pair.reason) == ("unobserved", reason)


def test_a_classifier_that_moved_judges_nothing(
    queue: Queue, link: Any, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put()
    put("shadow")
    FlaggedTerm.objects.create(term="of this test alone")
    wrong = SelfTest(1, CASES[:1])
    monkeypatch.setattr(RulesV1, "self_test", lambda self: wrong)

    with pytest.raises(ClassifierBroken):
        intake(queue)

    assert not Pair.objects.exists()
    assert link.xlen("answers") == 2


def test_copies_are_billed_apart_and_to_nobody(queue: Queue, put: Put) -> None:
    for name in ("a", "b"):
        put(copy_of=name, awaits=("shadow", "self"))
        put("shadow", name, completion_tokens=5)
        put("self", name)
    put(copy_of="c")
    put("shadow", "c", outcome="dropped", dropped="late")
    intake(queue)

    costs = Pair.objects.of_rollout("ro").costs()

    assert {arm: row["copies"] for arm, row in costs.items()} == {"self": 2, "shadow": 2}
    assert costs["shadow"]["completion_tokens"] == 10
    assert costs["shadow"]["engine_s"] == 0.5
    assert not RequestLog.objects.exists()


def test_many_pairs_are_stored_in_one_call(queue: Queue, put: Put) -> None:
    for number in range(250):
        put(copy_of=f"r{number}")
        put("shadow", f"r{number}")
    assert intake(queue) == 250
    assert Pair.objects.count() == 250
