"""Four bits against sixteen on the real engine: cheap shadow, shadow, canary and promotion, by what was counted alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.faults.instance import Instance
from tests.flows.questions import Question, ask_in_turn
from tests.flows.rollouts import Office, RolloutRun, open_office

pytestmark = pytest.mark.slow

REAL_ENGINE = {
    "TATKAL_ENGINE": "inference.engine.llm_engine:LLMEngine.load",
    "TATKAL_ENGINE_SLOTS": "2",
}
BF16, INT4 = "smollm2-135m-instruct/1", "smollm2-135m-instruct/2"
SHARES = {"en": 2, "de": 1, "es": 1}
NUM_SCORED, NUM_SHADOWED, NUM_CANARY = 12, 24, 24
SCORE_STEP, SHADOW_STEP, CANARY_STEP = 0, 1, 2


def make_policy(margin: float) -> dict[str, Any]:
    """Score, shadow, canary and a short watch; failures may be more by ``margin``, on all traffic and on each language."""
    return {
        "block_s": 1,
        "metrics": {
            "failure_rate": {
                "kind": "flags", "flags": [], "modes": ["shadow", "canary"], "segments": ["lang"],
                "tolerance": 0.01, "margin": 0.9, "overall_margin": margin, "minimum": 5,
            },
            "disagreement": {
                "kind": "score", "field": "disagreement", "modes": ["score"], "segments": [],
                "critical": False, "tolerance": 0.4, "margin": 0.6, "overall_margin": 0.6, "minimum": 10,
            },
        },
        "segments": {"keys": ["lang"], "minimum": 1000},
        "traffic": [
            {"segment": {}, "per_hour": 4000, "loss_rate": 0.001},
            *({"segment": {"lang": lang}, "per_hour": 1000 * share, "loss_rate": 0.001} for lang, share in SHARES.items()),
        ],
        "steps": [
            {"type": "score", "share": 1.0, "floor": 3},
            {"type": "shadow", "share": 1.0, "self_share": 0.25, "floor": 5},
            {"type": "canary", "bp": 5000, "floor": 5, "for_s": 0},
            {"type": "bake", "for_s": 1},
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def instance(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    home = tmp_path_factory.mktemp("rollout") / "home"
    with Instance(prepared_home, home, max_requests=16, **REAL_ENGINE) as instance:
        yield instance


@pytest.fixture(scope="module")
def office(instance: Instance) -> Iterator[Office]:
    with open_office(instance) as office:
        yield office


@pytest.fixture(scope="module")
def questions() -> Iterator[Question]:
    """No question comes twice."""
    return ask_in_turn(SHARES)


def score_and_shadow(run: RolloutRun, questions: Iterator[Question]) -> None:
    """The first two steps, with all their questions counted."""
    run.wait_for_step(SCORE_STEP)
    run.ask(list(islice(questions, NUM_SCORED)))
    run.count()
    run.wait_for_step(SHADOW_STEP)
    run.ask(list(islice(questions, NUM_SHADOWED)))
    run.count()


def forecast_of(run: RolloutRun) -> dict[tuple[str, str], int]:
    """How many observations each gate was expected to take at the start."""
    told = run.ask_office("tell")["forecast"]
    return {(each["metric"], each["segment"]): each["num"] for each in told}


def test_too_few_prompts_for_the_margin_are_inconclusive_and_nothing_moves(
    instance: Instance, office: Office, questions: Iterator[Question]
) -> None:
    run = RolloutRun.start(instance, office, INT4, make_policy(margin=0.02))
    score_and_shadow(run, questions)
    state = run.wait_for(lambda row: "more are needed" in row["why"])

    assert forecast_of(run)["failure_rate", "[]"] > NUM_SHADOWED
    assert (state["state"], state["step_index"]) == ("progressing", SHADOW_STEP)
    assert state["verdict"] == "INCONCLUSIVE"
    gate = run.gates()["failure_rate", "all traffic"]
    assert (gate["verdict"], gate["n"]) == ("INCONCLUSIVE", NUM_SHADOWED)
    assert gate["needed"] > 0
    assert run.act("abort", reason="a test")["state"] == "aborted"
    assert instance.endpoint()["live"] == BF16


def test_enough_prompts_take_the_candidate_from_score_to_live(
    instance: Instance, office: Office, questions: Iterator[Question]
) -> None:
    run = RolloutRun.start(instance, office, INT4, make_policy(margin=0.3))
    score_and_shadow(run, questions)
    run.wait_for_step(CANARY_STEP)
    replies = run.ask(list(islice(questions, NUM_CANARY)))
    run.count()
    ended = run.wait_for_state("promoted")

    assert forecast_of(run)["failure_rate", "[]"] <= NUM_SHADOWED
    assert (ended["verdict"], ended["is_forced"]) == ("PASS", False)
    assert instance.endpoint()["live"] == INT4
    assert [event["type"].removeprefix("rollout.") for event in run.events()] == [
        *("created", "step_started", "step_started", "step_started", "promoted", "succeeded")
    ]
    assert {reply.status_code for reply in replies} == {200}
    arms = Counter(reply.headers["x-model-version"] for reply in replies)
    assert arms[BF16] + arms[INT4] == NUM_CANARY
    assert min(arms[BF16], arms[INT4]) >= 5, "Both answer a canary of a half."


def test_the_stored_looks_and_counts_explain_the_promotion(instance: Instance) -> None:
    promoted = next(
        each["id"]
        for each in instance.call("GET", "rollouts")["results"]
        if each["state"] == "promoted"
    )
    timeline = instance.call("GET", f"rollouts/{promoted}/timeline")["results"]
    gates = instance.call("GET", f"rollouts/{promoted}/segments")["results"]
    copies = instance.call("GET", f"rollouts/{promoted}/copies")

    looks = [entry for entry in reversed(timeline) if entry["kind"] == "look"]
    assert [look["data"]["decision"] for look in looks] == ["inconclusive", "promote"]
    assert looks[-1]["reason"] in {
        entry["reason"] for entry in timeline if entry["kind"] == "event"
    }
    assert {gate["verdict"] for gate in gates} == {"PASS"}
    numbers = {(gate["metric"], gate["name"]): gate["n"] for gate in gates}
    assert numbers["disagreement", "all traffic"] == NUM_SCORED
    assert NUM_SHADOWED < numbers["failure_rate", "all traffic"] <= NUM_SHADOWED + NUM_CANARY
    compared = {arm["arm"]: arm["compared"] for arm in copies["arms"]}
    assert (compared["score"], compared["shadow"]) == (NUM_SCORED, NUM_SHADOWED)
    assert copies["floor"] == {"different": 0, "n": compared["self"]}
    assert compared["self"] > 0, "The incumbent answered some requests twice, and said the same."
