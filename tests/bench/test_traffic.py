"""What a caller would have measured, and engines that are driven by hand."""

from __future__ import annotations

import pytest

from tests.bench.traffic import (
    Answer,
    Asked,
    Limits,
    arrive_at_random,
    drive,
    drive_in_waves,
    goodput,
    tokens_per_s,
)
from tests.inference.instant_engine import InstantEngine


def answer(sent_s: float, *times: float) -> Answer:
    made = Answer(sent_s)
    for token_id, at_s in enumerate(times):
        made.add(token_id, at_s)
    return made


def test_ttft_holds_the_wait_and_tpot_what_comes_after_the_first_token() -> None:
    one = answer(1.0, 3.0, 3.5, 4.0)
    assert (one.ttft_s, one.tpot_s) == (2.0, 0.5)
    assert answer(1.0, 3.0).tpot_s == 0.0


def test_throughput_runs_from_the_first_send_to_the_last_token() -> None:
    assert tokens_per_s([answer(1.0, 2.0, 3.0), answer(2.0, 5.0)]) == 3 / 4


@pytest.mark.parametrize(
    ("limits", "kept"), [(Limits(2.0, 1.0), 2), (Limits(1.5, 1.0), 1), (Limits(2.0, 0.5), 1)]
)
def test_goodput_counts_requests_that_kept_both_limits(limits: Limits, kept: int) -> None:
    answers = [answer(0.0, 1.0, 2.0, 3.0), answer(0.0, 2.0, 2.5, 3.0)]
    assert goodput(answers, limits) == kept / 3.0


def test_arrivals_are_those_of_the_seed_and_of_the_rate() -> None:
    asked = [Asked((1,), 1)] * 2_000
    due = [each.due_s for each in arrive_at_random(asked, rate=50.0, seed=7)]
    assert due == [each.due_s for each in arrive_at_random(asked, rate=50.0, seed=7)]
    assert due != [each.due_s for each in arrive_at_random(asked, rate=50.0, seed=8)]
    assert due == sorted(due)
    assert 2_000 / due[-1] == pytest.approx(50.0, rel=0.1)  # 4.5 standard deviations


def test_every_request_is_sent_when_it_is_due_and_answered_in_order() -> None:
    asked = [Asked((1,), 3, due_s=0.06), Asked((2,), 2), Asked((3,), 1, due_s=0.03)]
    engine = InstantEngine(step_s=0.001)
    answers = drive(engine, asked)
    assert [len(each.token_ids) for each in answers] == [3, 2, 1]
    assert all(each.first_s >= each.sent_s for each in answers)
    assert answers[0].first_s > answers[2].last_s > answers[1].last_s
    assert max(map(len, engine.batches)) == 1


def test_waves_wait_for_their_longest_and_their_wait_counts() -> None:
    asked = [Asked((1,), length) for length in (1, 4, 2, 2)]
    engine = InstantEngine(step_s=0.002)
    answers = drive_in_waves(engine, asked, size=2)
    assert [len(batch) for batch in engine.batches] == [2, 1, 1, 1, 2, 2]
    assert all(each.sent_s == 0.0 for each in answers)
    assert answers[2].first_s > answers[1].last_s


def test_a_request_that_fails_ends_the_run() -> None:
    engine = InstantEngine()
    with pytest.raises(RuntimeError, match="not numbers"):
        drive(engine, [Asked((-5,), 8)])  # the token of the word "nan"
