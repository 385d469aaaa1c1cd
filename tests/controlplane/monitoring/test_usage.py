"""Usage: sums, quantiles and prices by version, key and endpoint, as the database finds them."""

from __future__ import annotations

import math
import random
from datetime import timedelta
from typing import Any

import pytest

from controlplane.monitoring.usage import Quantiles, Usage, sum_usage
from tests.factories import NOW, make_log_row

pytestmark = pytest.mark.django_db


def usage(group_by: str = "version", *, price: float | None = None) -> dict[str, Usage]:
    """Of the hour before ``NOW``, by name."""
    since = NOW - timedelta(hours=1)
    found = sum_usage(group_by=group_by, since=since, until=NOW, price_per_hour=price)
    return {each.name: each for each in found}


def make_answer(**fields: Any) -> None:
    """A whole answer a minute ago."""
    values: dict[str, Any] = {"finished_at": NOW - timedelta(minutes=1), "engine_s": 0.5}
    make_log_row(**values | fields)


def test_tokens_and_engine_seconds_are_summed_over_whole_answers() -> None:
    make_answer(prompt_tokens=10, cached_tokens=4, completion_tokens=20, engine_s=0.25)
    make_answer(prompt_tokens=1, completion_tokens=30, engine_s=0.75)
    make_answer(outcome="cancelled", completion_tokens=500, engine_s=None, total_s=100.0)
    only = usage()["tiny/1"]
    assert (only.num_requests, only.num_ok) == (3, 2)
    assert (only.prompt_tokens, only.cached_tokens, only.completion_tokens) == (11, 4, 50)
    assert only.engine_s == pytest.approx(1.0)
    assert only.tokens_per_s == pytest.approx(50.0)
    assert only.engine_s_per_1k_tokens == pytest.approx(20.0)
    assert only.total_s.n == 2


def test_a_price_per_hour_becomes_a_cost_per_request_and_per_1k_tokens() -> None:
    for _ in range(4):
        make_answer(completion_tokens=250, engine_s=9.0)
    found = usage(price=2.0)["tiny/1"]
    assert found.cost == pytest.approx(36.0 / 3600 * 2.0)
    assert found.cost_per_request == pytest.approx(9.0 / 3600 * 2.0)
    assert found.cost_per_1k_tokens == pytest.approx(36.0 / 3600 * 2.0)


def test_without_a_price_there_is_no_cost_but_seconds() -> None:
    make_answer(completion_tokens=100, engine_s=2.0)
    found = usage()["tiny/1"]
    assert (found.cost, found.cost_per_request, found.cost_per_1k_tokens) == (None, None, None)
    assert found.engine_s_per_1k_tokens == pytest.approx(20.0)


def test_answers_of_slots_that_did_not_count_seconds_change_no_rate() -> None:
    make_answer(completion_tokens=100, engine_s=2.0)
    make_answer(completion_tokens=900, engine_s=None)
    found = usage(price=1.0)["tiny/1"]
    assert (found.completion_tokens, found.billed_tokens, found.num_billed) == (1000, 100, 1)
    assert found.tokens_per_s == pytest.approx(50.0)
    assert found.cost_per_request == pytest.approx(2.0 / 3600)


def test_a_group_without_a_billed_answer_has_no_rate() -> None:
    make_answer(outcome="cancelled", engine_s=None)
    found = usage(price=1.0)["tiny/1"]
    assert (found.tokens_per_s, found.cost_per_request, found.cost_per_1k_tokens) == (None,) * 3
    assert found.total_s == Quantiles()


@pytest.mark.parametrize("num", [1, 2, 99, 100, 101, 250])
def test_quantiles_are_nearest_ranks_and_missing_where_none_lies_beyond(num: int) -> None:
    times = [index / 8 for index in range(1, num + 1)]
    for time in random.Random(num).sample(times, num):  # noqa: S311
        make_answer(total_s=time)
    found = usage()["tiny/1"].total_s
    p50, p99 = times[math.ceil(num / 2) - 1], times[math.ceil(num * 99 / 100) - 1]
    assert found == Quantiles(num, p50 if num >= 2 else None, p99 if num >= 100 else None)


def test_each_group_has_ranks_of_its_own() -> None:
    for index in range(100):
        make_answer(version="tiny/1", total_s=1.0 + index)
        make_answer(version="tiny/2", total_s=1000.0 + index)
    found = usage()
    assert found["tiny/1"].total_s == Quantiles(100, 50.0, 99.0)
    assert found["tiny/2"].total_s == Quantiles(100, 1049.0, 1098.0)


def test_times_to_the_first_token_count_only_where_there_was_one() -> None:
    make_answer(first_token_s=0.2)
    make_answer(first_token_s=0.4)
    make_answer(first_token_s=None)
    found = usage()["tiny/1"]
    assert found.first_token_s == Quantiles(2, 0.2, None)
    assert found.total_s.n == 3


def test_groups_are_by_version_key_or_endpoint_and_the_busiest_comes_first() -> None:
    make_answer(version="tiny/1", key_id="k1", endpoint="chat")
    for _ in range(2):
        make_answer(version="tiny/2", key_id="k1", endpoint="code")
    make_answer(version="", key_id="k2", endpoint="chat", outcome="no_ready_slot", status=503)
    assert [(each.name, each.num_requests) for each in usage().values()] == [
        ("tiny/2", 2),
        ("tiny/1", 1),
    ]
    assert {name: each.num_requests for name, each in usage("key").items()} == {"k1": 3, "k2": 1}
    assert {name: each.num_ok for name, each in usage("endpoint").items()} == {"code": 2, "chat": 1}


def test_the_window_begins_with_its_start_and_ends_before_its_end() -> None:
    for minutes in (60, 0, -1, 61):
        make_answer(finished_at=NOW - timedelta(minutes=minutes))
    assert usage()["tiny/1"].num_requests == 1
