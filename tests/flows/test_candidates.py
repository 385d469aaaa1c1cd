"""Candidates that differ from what is live in one thing alone: the libraries they run under, or the chat template."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from controlplane.rollouts.forecasts import Assumptions, Step, forecast
from controlplane.rollouts.policy import parse_policy
from drift.eprocess import Side
from drift.power import Claim, forecast_differences, shares_of_pairs
from tests.faults import checkpoints
from tests.faults.instance import Instance
from tests.faults.states import has_ready
from tests.flows.questions import ask_in_turn
from tests.flows.rollouts import Office, RolloutRun, open_office
from tests.inference.slot_process import wait_until
from tests.virtual_environment import make_environment, site_packages

pytestmark = pytest.mark.slow

# The real engine, with real templates, for a small model.
ENGINE = {"TATKAL_ENGINE": "tests.faults.mixed_engine:load", "TATKAL_ENGINE_SLOTS": "4"}
LIVE = "small/1"
CONTEXT_LENGTH = 1024
GOOD = "{% for message in messages %}<|im_start|>{{ message['content'] }}\n{% endfor %}"
# Somebody wanted another style for Hindi, and took the name of a variable from another server.
BROKEN = (
    "{% for message in messages %}<|im_start|>"
    "{% if 'में' in message['content'] %}{{ locale.style }}{% endif %}"
    "{{ message['content'] }}\n{% endfor %}"
)
SHARES = {"en": 6, "es": 3, "de": 3, "hi": 1}
HINDI = (("lang", "hi"),)
POLICY: dict[str, Any] = {
    "block_s": 1,
    "metrics": {
        "failure_rate": {
            "kind": "flags", "flags": [], "modes": ["shadow"], "segments": ["lang"],
            "tolerance": 0.1, "margin": 0.3, "overall_margin": 0.2, "minimum": 10,
        }
    },
    "segments": {"keys": ["lang"], "minimum": 1000},
    "traffic": [
        {"segment": {} if lang is None else {"lang": lang}, "per_hour": 1000 * share, "loss_rate": 0.001}
        for lang, share in ((None, sum(SHARES.values())), *SHARES.items())
    ],
    "steps": [
        {"type": "shadow", "share": 1.0, "self_share": 0.0, "floor": 10},
        {"type": "canary", "bp": 1000, "floor": 10, "until": "floor", "for_s": 0},
        {"type": "bake", "for_s": 60},
    ],
}  # fmt: skip

SHADOW_ONLY: dict[str, Any] = {
    "block_s": 1,
    "metrics": {"failure_rate": {"kind": "flags", "flags": [], "modes": ["shadow"]}},
    "steps": [{"type": "shadow", "share": 1.0, "floor": 20, "until": "floor"}],
}
NUM_SHADOWED = 22
# Other releases of torch have no build for the CPU alone in the index; of these two every one is.
OTHER_RELEASES = ("numpy<2.4", "tokenizers<0.23")
INSTALL_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def instance(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """An instance whose endpoint has a small model live."""
    path = tmp_path_factory.mktemp("template") / "home"
    with Instance(prepared_home, path, max_requests=32, **ENGINE) as instance:
        models = instance.home.path / "models"
        source = checkpoints.write_good(models / "small", max_position_embeddings=CONTEXT_LENGTH)
        (source / "chat_template.jinja").write_text(GOOD)
        good = register(instance, source_kind="huggingface", source=str(source))
        instance.change(candidate=good)
        instance.wait_for(lambda state: has_ready(state, good), timeout_s=60)
        instance.promote(good)
        yield instance


def register(instance: Instance, **source: Any) -> str:
    """A version of the small model, once it can be loaded; its name."""
    name: str = instance.call("POST", "versions", {"model": "small", "dtype": "float32", **source})[
        "name"
    ]
    wait_until(lambda: instance.call("GET", f"versions/{name}")["state"] == "ready", timeout_s=60)
    return name


@pytest.fixture
def office(instance: Instance) -> Iterator[Office]:
    with open_office(instance) as office:
        yield office


@pytest.mark.parametrize("release", ["the same", "another"])
def test_the_same_weights_under_another_environment_are_shadowed_as_any_candidate(
    instance: Instance, office: Office, release: str
) -> None:
    path = make_environment(instance.home.path / "runtimes" / release.replace(" ", "-"), plum="1.0")
    if release == "another":
        install_or_skip(path, *OTHER_RELEASES)
    candidate = register(
        instance, source_kind="artifact", source=LIVE, runtime={"interpreter": str(path)}
    )
    runtime = instance.call("GET", f"versions/{candidate}")["runtime"]
    run = RolloutRun.start(instance, office, candidate, SHADOW_ONLY)
    run.wait_for_step(0)
    run.ask(list(islice(ask_in_turn(SHARES), NUM_SHADOWED)))
    (slot,) = (
        each for each in instance.call("GET", "slots")["results"] if each["version"] == candidate
    )
    run.count()
    run.wait_for_state("completed")
    # Beside them the incumbent may have answered one or two once more.
    pairs = [pair for pair in run.read("pairs")["results"] if pair["arm"] == "shadow"]

    assert runtime["digest"] in slot["runtime"]
    assert str(path) in slot["runtime"]
    assert len(pairs) == NUM_SHADOWED
    assert {pair["state"] for pair in pairs} == {"compared"}
    assert {pair["candidate_fingerprint"] for pair in pairs} == {slot["fingerprint"]}
    assert slot["fingerprint"] not in {pair["incumbent_fingerprint"] for pair in pairs}
    # What is told is true in both cases; that nothing changes is known beforehand only of the same libraries.
    floor = run.read("copies")["candidate"]
    assert floor == {"different": sum(pair["differs"] for pair in pairs), "n": NUM_SHADOWED}
    if release == "the same":
        assert floor["different"] == 0
    else:
        live = instance.call("GET", f"versions/{LIVE}")["runtime"]
        assert runtime["numpy"] != live["numpy"]
        assert runtime["tokenizers"] != live["tokenizers"]


def install_or_skip(path: Path, *requirements: str) -> None:
    """Put packages into an environment, before those that it shares with the tests."""
    command = ["-m", "pip", "install", "-qq", "--no-deps", "--only-binary=:all:"]
    try:
        subprocess.run(
            [sys.executable, *command, "--target", str(site_packages(path)), *requirements],
            check=True,
            capture_output=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"No other releases can be installed here: {error}")


def count_questions() -> int:
    """As many as it is expected to take to name a language that always fails, and to show a mean below its margin."""
    policy = parse_policy(POLICY)
    rule = policy.metrics[0]
    always = forecast(policy, policy.traffic, Step("shadow", 1.0), Assumptions(harm=0.99))
    num_to_name = next(each.to_fail.num for each in always if each.segment == HINDI)
    mean_is_safe = Claim(rule.overall_margin, Side.BELOW, -math.log(policy.alpha))
    share = SHARES["hi"] / sum(SHARES.values())
    num_to_pass = forecast_differences(shares_of_pairs(share, share), mean_is_safe, 1.0).num
    assert num_to_name is not None
    assert num_to_pass is not None
    num_turns = max(num_to_name / SHARES["hi"], num_to_pass / sum(SHARES.values()))
    return math.ceil(1.1 * num_turns) * sum(SHARES.values())


def test_a_language_that_a_template_breaks_is_named_and_the_mean_would_have_passed(
    instance: Instance, office: Office
) -> None:
    template = instance.home.path / "models" / "broken.jinja"
    template.write_text(BROKEN)
    broken = register(instance, source_kind="artifact", source=LIVE, chat_template=str(template))
    run = RolloutRun.start(instance, office, broken, POLICY)
    run.wait_for_step(0)
    questions = list(islice(ask_in_turn(SHARES), count_questions()))
    replies = run.ask(questions, max_tokens=4)
    num_pairs = run.count()["num_pairs"]
    ended = run.wait_for_state("rolled_back")

    served = Counter((reply.status_code, reply.headers["x-model-version"]) for reply in replies)
    assert served == {(200, LIVE): len(questions)}, "Nobody met the candidate."
    assert num_pairs == len(questions)
    assert ended["verdict"] == "FAIL"
    event = run.events()[-1]
    assert event["type"] == "rollout.rolled_back"
    assert [each["name"] for each in event["data"]["failed"]] == ["lang=hi"]
    assert "failure_rate on lang=hi" in event["reason"]
    gates = run.gates()
    verdicts = {name: gate["verdict"] for (_, name), gate in gates.items()}
    others = dict.fromkeys(("all traffic", "lang=en", "lang=es", "lang=de"), "PASS")
    assert verdicts == {"lang=hi": "FAIL", **others}
    assert gates["failure_rate", "lang=hi"]["estimate"] == 1.0
    assert instance.endpoint()["live"] == LIVE

    pooled = run.ask_office("pool")
    (mean,) = pooled["results"]
    assert (pooled["decision"], mean["verdict"]) == ("promote", "PASS")
    assert mean["n"] == len(questions)
    assert mean["estimate"] == pytest.approx(SHARES["hi"] / sum(SHARES.values()))


def test_the_pairs_say_what_went_wrong(instance: Instance) -> None:
    rollout = instance.call("GET", "rollouts?state=rolled_back")["results"][0]
    disagreeing = instance.call("GET", f"rollouts/{rollout['id']}/pairs?disagree=1")["results"]

    assert {pair["segments"]["lang"] for pair in disagreeing} == {"hi"}
    assert {pair["reason"] for pair in disagreeing} == {"chat_template_error"}
    assert {(pair["incumbent_outcome"], pair["state"]) for pair in disagreeing} == {
        ("ok", "failed")
    }
