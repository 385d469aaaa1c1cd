"""Several choices, log-probabilities and scores on their way through the loop, on a real Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inference.engine import intake as intake_module
from inference.protocol import FinishReason, Score, TokenRow
from tests.inference.engine.loop_bench import Bench
from tests.inference.instant_engine import golden_logprob, golden_score, golden_text
from tests.inference.slot_process import wait_until


@pytest.fixture
def bench(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(intake_module, "PULL_BLOCK_MS", 50)
    monkeypatch.setattr(intake_module, "WATCH_BLOCK_MS", 50)
    bench = Bench(redis_url)
    yield bench
    bench.stop()
    bench.queue.close()
    bench.redis.close()


def of_choice(rows: list[TokenRow], choice: int) -> list[TokenRow]:
    return [row for row in rows if row.choice == choice]


def wait_for_ends(bench: Bench, request_id: str, number: int) -> list[TokenRow]:
    wait_until(lambda: sum(row.is_last for row in bench.rows(request_id)) == number)
    return bench.rows(request_id)


def test_the_rows_of_each_choice_have_numbers_and_an_end_of_their_own(bench: Bench) -> None:
    bench.send("r1", "one two three", n=3)
    bench.start()

    rows = wait_for_ends(bench, "r1", 3)

    for choice in range(3):
        mine = of_choice(rows, choice)
        assert [row.seq for row in mine] == list(range(4 + choice))
        assert "".join(row.text for row in mine) == golden_text(4 + choice, choice=choice)
        assert [row.is_last for row in mine] == [False] * (3 + choice) + [True]
        finish = mine[-1].finish
        assert finish is not None
        assert (finish.prompt_tokens, finish.completion_tokens) == (3, 4 + choice)
        assert finish.first_token_s <= finish.total_s
    firsts = {row.finish.first_token_s for row in rows if row.finish}
    assert len(firsts) == 1, "The first token is the request's."


def test_a_request_is_given_back_to_nobody_before_its_last_choice_has_ended(bench: Bench) -> None:
    loop = bench.start(step_s=0.05)
    bench.send("r1", max_tokens=4, n=2)
    wait_for_ends(bench, "r1", 1)

    assert [ticket.id for ticket in loop.tickets()] == ["r1"]
    assert bench.num_left() == 1
    wait_for_ends(bench, "r1", 2)
    wait_until(lambda: bench.num_left() == 0)
    assert loop.tickets() == []


def test_one_choice_that_fails_ends_the_request(bench: Bench) -> None:
    bench.send("bad", "nan", n=3)
    bench.send("good", n=2)
    bench.start()

    rows = bench.wait_for_last("bad")
    wait_for_ends(bench, "good", 2)

    assert sum(row.is_last for row in rows) == 1
    assert rows[-1].failure is not None
    wait_until(lambda: bench.num_left() == 0)
    assert not bench.engine.has_unfinished


def test_cancelling_ends_every_choice(bench: Bench) -> None:
    bench.start(step_s=0.01)
    bench.send("r1", max_tokens=10_000, n=4)
    wait_until(lambda: bool(bench.rows("r1")))

    bench.cancel("r1")

    wait_until(lambda: not bench.engine.has_unfinished)
    wait_until(lambda: bench.num_left() == 0)


def test_a_second_attempt_numbers_every_choice_again(bench: Bench) -> None:
    bench.send("r1", n=2)
    bench.deliver_in_vain(1)
    bench.start()

    rows = wait_for_ends(bench, "r1", 2)

    assert [(row.attempt, row.seq) for row in of_choice(rows, 1)] == [(2, seq) for seq in range(5)]


def test_log_probabilities_go_with_their_rows(bench: Bench) -> None:
    bench.send("asked", logprobs=2)
    bench.send("plain")
    bench.start()

    asked, plain = bench.wait_for_last("asked"), bench.wait_for_last("plain")

    assert [row.logprob for row in asked] == [
        golden_logprob(f"t{index} ", index, 2) for index in range(4)
    ]
    assert {row.logprob for row in plain} == {None}


def test_the_salt_of_the_gateway_reaches_the_engine(bench: Bench) -> None:
    bench.send("r1", cache_salt="tenant")
    bench.start()
    bench.wait_for_last("r1")

    assert bench.engine.salts == {"r1": "tenant"}


def test_a_scored_answer_is_one_row_with_its_score(bench: Bench) -> None:
    text = "an answer of six words already"
    bench.send("r1", "one two three", score_text=text, n=3)
    bench.start()

    (row,) = bench.wait_for_last("r1")

    assert (row.seq, row.choice, row.text) == (0, 0, "")
    assert row.finish is not None
    assert row.finish.reason is FinishReason.STOP
    assert row.finish.score == golden_score(text)
    assert (row.finish.prompt_tokens, row.finish.completion_tokens) == (3, 6)
    wait_until(lambda: bench.num_left() == 0)


def test_an_empty_answer_has_an_empty_score_without_a_step(bench: Bench) -> None:
    bench.send("r1", "one two three", score_text="")
    bench.start()

    (row,) = bench.wait_for_last("r1")

    assert row.finish is not None
    assert row.finish.score == Score((), 0)
    assert (row.finish.prompt_tokens, row.finish.completion_tokens) == (3, 0)
    assert bench.engine.batches == []
    wait_until(lambda: bench.num_left() == 0)
