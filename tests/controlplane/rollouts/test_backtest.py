"""Recorded traffic in, a verdict out: the whole path by `manage.py backtest`."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from controlplane.rollouts.backtest import dump, run
from controlplane.rollouts.policy import default_policy, parse_policy
from tests.recordings import World, canary_rows, shadow_rows, to_lines

ROOT = Path(__file__).resolve().parents[3]
Rows = list[dict[str, Any]]


def backtest(path: Path, rows: Rows | list[str], **options: Any) -> dict[str, Any]:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    out = io.StringIO()
    call_command("backtest", str(path), json=True, stdout=out, **options)
    report: dict[str, Any] = json.loads(out.getvalue())
    return report


def entry(report: dict[str, Any], metric: str, **segment: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = [
        one for one in report["segments"] if one["metric"] == metric and one["segment"] == segment
    ]
    assert len(found) == 1, report["segments"]
    return found[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traffic.jsonl"


EQUAL = shadow_rows(World(), 3_000, seed=1)


def test_an_equal_candidate_is_promoted_once_every_segment_is_shown(path: Path) -> None:
    world = World(incumbent=lambda labels, when: 0.01, candidate=lambda labels, when: 0.01)
    report = backtest(path, shadow_rows(world, 8_000, seed=2))
    assert report["verdict"] == "promote"
    assert report["alarms"] == []
    assert {one["verdict"] for one in report["segments"] if not one["is_discovered"]} == {"pass"}
    refund = entry(report, "flag_rate", topic="refund")
    assert refund["n"] > 300
    assert refund["lower"] <= refund["estimate"] <= refund["upper"] <= refund["margin"]


def test_a_candidate_that_is_worse_on_one_topic_is_rolled_back_by_name(path: Path) -> None:
    world = World(candidate=lambda labels, when: 0.25 if labels["topic"] == "refund" else 0.03)
    report = backtest(path, shadow_rows(world, 6_000, seed=3))
    assert report["verdict"] == "rollback"
    assert entry(report, "flag_rate", topic="refund")["verdict"] == "fail"
    assert entry(report, "flag_rate", topic="billing")["verdict"] != "fail"
    assert "topic=refund" in report["reason"]
    assert report["rollback_at"] is not None


def test_too_little_traffic_is_inconclusive_without_numbers(path: Path) -> None:
    report = backtest(path, shadow_rows(World(), 60, seed=4))
    assert report["verdict"] == "inconclusive"
    (only,) = report["segments"]
    assert (only["verdict"], only["n"]) == ("inconclusive", 60)
    assert only["estimate"] is only["lower"] is only["upper"] is only["e_harm"] is None
    assert {"segment": {"topic": "billing"}, "n": 24} in report["not_covered"] or report[
        "not_covered"
    ]


@pytest.mark.parametrize("lines", [[], [""]])
def test_an_empty_file_is_inconclusive(path: Path, lines: list[str]) -> None:
    report = backtest(path, lines)
    assert report["verdict"] == "inconclusive"
    assert report["rows"] == 0


def test_a_candidate_alone_is_inconclusive(path: Path) -> None:
    rows = [row for row in canary_rows(World(), 2_000, seed=5) if row["arm"] == "candidate"]
    assert backtest(path, rows)["verdict"] == "inconclusive"


def test_the_order_of_lines_and_a_second_run_change_no_byte() -> None:
    rows = shadow_rows(World(), 1_500, seed=6) + [
        row | {"request_id": f"c{row['request_id']}"} for row in canary_rows(World(), 2_500, seed=7)
    ]
    lines = to_lines(rows)
    shuffled = list(lines)
    random.Random(8).shuffle(shuffled)  # noqa: S311 (an order, no secret)
    repeated = shuffled + shuffled[:500]
    once, again, other = (
        dump(run(given, default_policy()).to_json() | {"rows": 0})
        for given in (lines, lines, repeated)
    )
    assert once == again == other


@pytest.mark.slow
def test_two_processes_with_other_hash_seeds_print_the_same_bytes(path: Path) -> None:
    path.write_text("\n".join(to_lines(EQUAL)))
    outputs = [
        subprocess.run(
            [sys.executable, "manage.py", "backtest", str(path), "--json"],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed, "DJANGO_SETTINGS_MODULE": "tests.settings"},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0])["rows"] == 6_000


def test_malformed_lines_are_told_by_number_and_skipped(path: Path) -> None:
    bad = [
        "{",
        "[]",
        '{"ts": 1}',
        json.dumps(EQUAL[0] | {"ts": "noon"}),
        json.dumps(EQUAL[0] | {"arm": "b"}),
    ]
    report = backtest(path, [*map(json.dumps, EQUAL[:400]), *bad])
    assert [one["line"] for one in report["malformed"]] == [401, 402, 403, 404, 405]
    assert report["malformed"][2]["error"] == "request_id is missing; it must be a text."
    assert report["rows"] == 400


def test_a_malformed_line_is_fatal_where_that_is_asked_for(path: Path) -> None:
    with pytest.raises(CommandError, match="line 2: is not JSON"):
        backtest(path, [json.dumps(EQUAL[0]), "nonsense"], strict=True)


def test_a_missing_file_and_a_wrong_policy_are_told(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file"):
        call_command("backtest", str(path))
    policy = tmp_path / "policy.json"
    policy.write_text('{"alpha": 2}')
    with pytest.raises(CommandError, match=r"alpha=2 must be a number"):
        backtest(path, EQUAL, policy=policy)


def test_the_table_reads_without_json(path: Path) -> None:
    path.write_text("\n".join(to_lines(EQUAL)))
    out = io.StringIO()
    call_command("backtest", str(path), stdout=out)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(("PROMOTE", "INCONCLUSIVE"))
    assert lines[2].split() == [
        "segment",
        "metric",
        "verdict",
        "n",
        "estimate",
        "lower",
        "upper",
        "margin",
        "needed",
    ]
    assert lines[3].startswith("all traffic")


def test_repeats_of_a_prompt_count_once(path: Path) -> None:
    rows = [
        row | {"prompt": f"  Same   QUESTION {int(row['request_id'][1:]) % 150}"} for row in EQUAL
    ]
    assert entry(backtest(path, rows), "flag_rate")["n"] == 150


def test_an_error_after_dispatch_is_a_failure_and_a_dropped_copy_is_not_observed(
    path: Path,
) -> None:
    failed = [
        row | {"outcome": "timeout", "response": None}
        if row["arm"] == "candidate" and int(row["request_id"][1:]) % 5 == 0
        else row
        for row in EQUAL
    ]
    report = backtest(path, failed)
    assert report["verdict"] == "rollback"
    dropped = [row | {"outcome": "dropped"} if "outcome" in row else row for row in failed]
    report = backtest(path, dropped)
    assert report["verdict"] != "rollback"
    overall = entry(report, "flag_rate")
    assert (overall["n"], overall["coverage"]) == (2_400, 0.8)
    assert any("600 shadow copies were dropped" in notice for notice in report["notices"])


def test_drops_that_depend_on_a_segment_are_reported(path: Path) -> None:
    world = World(is_dropped=lambda labels, when, chance: labels["lang"] == "hi" and chance < 0.5)
    report = backtest(path, shadow_rows(world, 3_000, seed=9))
    assert any("of lang=hi against 0% elsewhere" in notice for notice in report["notices"])


def test_copies_gate_nothing_on_latency(path: Path) -> None:
    slow = shadow_rows(World(slowdown=lambda rng: 4.0), 3_000, seed=10)
    report = backtest(path, slow)
    assert report["verdict"] != "rollback"
    assert any("p99_latency was not asked for" in notice for notice in report["notices"])


def test_a_slow_tail_fails_whatever_the_mean(path: Path) -> None:
    world = World(slowdown=lambda rng: 3.6 if rng.random() < 0.03 else 0.9)
    tail = entry(backtest(path, canary_rows(world, 8_000, seed=11)), "p99_latency")
    assert tail["verdict"] == "fail"
    assert tail["lower"] > 0.01
    assert tail["limit_ms"] > 0


def test_with_120_requests_the_tail_is_inconclusive(path: Path) -> None:
    tail = entry(backtest(path, canary_rows(World(), 240, seed=12)), "p99_latency")
    assert tail["verdict"] == "inconclusive"
    assert tail["estimate"] is None
    assert 90 < tail["n"] < 150


def test_a_metric_without_any_measurement_is_no_pass(path: Path) -> None:
    rows = [row | {"latency_ms": None} for row in canary_rows(World(), 6_000, seed=13)]
    report = backtest(path, rows)
    assert report["overall"] == "ERROR"
    assert report["verdict"] == "inconclusive"
    assert "no candidate request has a latency" in entry(report, "p99_latency")["sentence"]


def test_a_ramp_during_a_rush_is_no_fault_of_the_candidate(path: Path) -> None:
    def in_rush(when: float) -> bool:
        return 0.4 < when < 0.6

    world = World(
        incumbent=lambda labels, when: 0.2 if in_rush(when) else 0.02,
        candidate=lambda labels, when: 0.2 if in_rush(when) else 0.02,
        canary_share=lambda when: 0.3 if when > 0.4 else 0.02,
    )
    assert backtest(path, canary_rows(world, 8_000, seed=14))["verdict"] != "rollback"


def test_scores_costs_tags_and_lengths_are_judged_by_a_policy(path: Path, tmp_path: Path) -> None:
    rows = [
        row | {
            "cost": 3.0 if row["arm"] == "candidate" else 2.0,
            "badness": 0.33 if row["arm"] == "candidate" else 0.30,
            "tags": {"plan": "free"},
        }
        for row in EQUAL
    ]  # fmt: skip
    document = {
        "segments": {"keys": ["tags.plan", "length_band"]},
        "discovery": None,
        "metrics": {
            "cost": {"kind": "cost", "field": "cost", "tolerance": 0.05, "margin": 0.1},
            "badness": {
                "kind": "score",
                "field": "badness",
                "overall_margin": 0.06,
                "margin": 0.06,
            },
        },
    }
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps(document))
    report = backtest(path, rows, policy=policy)
    assert report["verdict"] == "rollback"
    cost = entry(report, "cost", **{"tags.plan": "free"})
    assert cost["verdict"] == "fail"
    assert cost["estimate"] == pytest.approx((3 - 2) / (3 + 2), abs=0.026)
    # 0.03 lies between grid points: rounded up it is still below the margin.
    assert entry(report, "badness", length_band="under 200")["verdict"] == "pass"


def test_golden_rows_are_left_to_drift(path: Path) -> None:
    golden = [row | {"mode": "golden", "run": "1", "fingerprint": "f"} for row in EQUAL[:10]]
    report = backtest(
        path, [*EQUAL, *(row | {"request_id": f"g{n}"} for n, row in enumerate(golden))]
    )
    assert "10 golden rows were not judged: they measure drift." in report["notices"]
    assert entry(report, "flag_rate")["n"] == 3_000


def test_a_declared_crossing_is_judged() -> None:
    policy = parse_policy({"segments": {"crossings": [["lang", "topic"]]}, "discovery": None})
    report = run(to_lines(EQUAL), policy).to_json()
    assert entry(report, "flag_rate", lang="en", topic="billing")["n"] > 400


@pytest.mark.slow
def test_sixty_thousand_rows_take_less_than_a_minute(path: Path) -> None:
    # The command's own limit is far away: some seconds on one core.
    rows = shadow_rows(World(hours=72), 30_000, seed=15)
    assert len(rows) == 60_000
    assert backtest(path, rows)["rows"] == 60_000
