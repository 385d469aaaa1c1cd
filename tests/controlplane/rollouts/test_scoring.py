"""Pairs wait for a scorer while their texts are there, and nothing waits for it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.monitoring.services import Retention
from controlplane.rollouts import scoring
from controlplane.rollouts.pairs import Pair
from controlplane.rollouts.scorers import Question, ScorerFailed
from controlplane.rollouts.scoring import expire_pairs, score_pairs
from inference.queue import Queue
from tests.controlplane.rollouts.test_intake import Put, intake, link, put
from tests.factories import NOW

__all__ = ["link", "put"]
pytestmark = pytest.mark.django_db


class PrefersSix:
    """Prefers the answer that says six, and fails on one that says seven."""

    name = "prefers-six"

    def __init__(self) -> None:
        self.num_asked = 0

    def prefer(self, question: Question) -> float:
        self.num_asked += 1
        if "Seven" in question.answer_a + question.answer_b:
            raise ScorerFailed("it is away")
        return 0.5 if "Six" in question.answer_b else -0.5


@pytest.fixture
def scorer() -> PrefersSix:
    return PrefersSix()


def pair_up(put: Put, name: str, text: str) -> None:
    put(copy_of=name)
    put("shadow", name, text=text)


def test_answers_that_differ_are_scored_and_then_forgotten(
    queue: Queue, put: Put, scorer: PrefersSix
) -> None:
    pair_up(put, "differs", "Six days.")
    pair_up(put, "same", "Five days.")
    assert intake(queue, scorer=scorer.name) == 2
    assert len(list(queue.read_answers())) == 2

    assert score_pairs(queue=queue, scorer=scorer, now=NOW) == 1
    assert score_pairs(queue=queue, scorer=scorer, now=NOW) == 0

    found = {
        pair.request_id: (pair.scoring, pair.scorer, pair.score) for pair in Pair.objects.all()
    }
    assert found == {
        "differs": ("done", "prefers-six", 0.5),
        "same": ("done", "prefers-six", 0.0),
    }
    assert scorer.num_asked == 1
    intake(queue, scorer=scorer.name)
    assert list(queue.read_answers()) == []
    assert Pair.objects.get(request_id="differs").candidate_text is None


def test_a_scorer_that_fails_is_told_and_blocks_nothing(
    queue: Queue, put: Put, scorer: PrefersSix
) -> None:
    pair_up(put, "a", "Seven days.")
    pair_up(put, "b", "Six days.")
    intake(queue, scorer=scorer.name)

    assert score_pairs(queue=queue, scorer=scorer, now=NOW) == 1

    states = {pair.request_id: (pair.scoring, pair.score) for pair in Pair.objects.all()}
    assert states == {"a": ("failed", None), "b": ("done", 0.5)}


def test_a_pair_whose_texts_are_gone_has_failed(queue: Queue, put: Put, scorer: PrefersSix) -> None:
    for name in ("trimmed", "old"):
        pair_up(put, name, "Six days.")
    intake(queue, scorer=scorer.name)
    Pair.objects.filter(request_id="old").update(at=NOW - timedelta(seconds=901))
    queue.delete_answers([half.entry_id for half in queue.read_answers()])

    assert score_pairs(queue=queue, scorer=scorer, now=NOW) == 0

    assert {pair.scoring for pair in Pair.objects.all()} == {"failed"}
    assert scorer.num_asked == 0


def test_a_slow_scorer_ends_in_time_and_goes_on_later(
    queue: Queue, put: Put, scorer: PrefersSix, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        pair_up(put, f"r{number}", "Six days.")
    intake(queue, scorer=scorer.name)
    monkeypatch.setattr(scoring, "BUDGET_S", 0.0)
    assert score_pairs(queue=queue, scorer=scorer, now=NOW) == 0
    monkeypatch.setattr(scoring, "BUDGET_S", 5.0)
    assert score_pairs(queue=queue, scorer=scorer, now=NOW) == 3


def test_pairs_and_their_texts_are_kept_as_long_as_the_log(queue: Queue, put: Put) -> None:
    for name in ("old", "older", "new"):
        put(copy_of=name, store_texts=True)
        put("shadow", name)
    intake(queue)
    Pair.objects.filter(request_id="old").update(at=NOW - timedelta(days=8))
    Pair.objects.filter(request_id="older").update(at=NOW - timedelta(days=31))
    retention = Retention(rows=timedelta(days=30), texts=timedelta(days=7))

    assert expire_pairs(retention=retention, now=NOW) == 1

    texts = {pair.request_id: pair.candidate_text for pair in Pair.objects.all()}
    assert texts == {"old": None, "new": "Five days."}
