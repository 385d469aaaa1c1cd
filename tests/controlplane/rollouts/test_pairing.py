"""What two halves tell, and which segments a pair belongs to."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from controlplane.rollouts import pairing
from controlplane.rollouts.pairing import Finding
from inference.protocol import Answer, ChatMessage, GenerateRequest, SamplingParams

INCUMBENT = Answer("r", "live", "chat", "tiny/1", 1, "ro", "fp", "ok", 100.0, "yes", "stop")
CANDIDATE = replace(INCUMBENT, arm="shadow", version="tiny/2")


def ask(content: str = "What is the refund policy for my order?", **fields: Any) -> GenerateRequest:
    messages = (ChatMessage("system", "आप सहायक हैं।"), ChatMessage("user", content))
    return GenerateRequest("r", "chat", SamplingParams(), 30.0, messages=messages, **fields)


@pytest.mark.parametrize(
    ("incumbent", "candidate", "finding"),
    [
        ({}, {}, Finding("compared")),
        ({"outcome": "generation_failed"}, {}, Finding("compared")),
        ({}, {"outcome": "deadline_exceeded"}, Finding("failed", "deadline_exceeded")),
        ({}, {"outcome": "invalid_prompt"}, Finding("failed", "invalid_prompt")),
        ({"outcome": "cancelled"}, {}, Finding("unobserved", "cancelled")),
        ({"outcome": "cancelled"}, {"outcome": "x"}, Finding("unobserved", "cancelled")),
        ({}, {"outcome": "dropped", "dropped": "late"}, Finding("unobserved", "late")),
    ],
)
def test_an_end_without_an_answer_counts_against_whoever_was_dispatched(
    incumbent: dict[str, Any], candidate: dict[str, Any], finding: Finding
) -> None:
    halves = (replace(INCUMBENT, **incumbent), replace(CANDIDATE, **candidate))
    assert pairing.judge_halves(*halves) == finding


@pytest.mark.parametrize(
    ("found", "finding"),
    [
        ("dispatched", Finding("failed", "slot_lost")),
        ("waiting", Finding("unobserved", "late")),
        ("gone", Finding("unobserved", "lost")),
    ],
)
def test_a_half_that_never_comes_is_judged_by_how_far_its_copy_came(
    found: str, finding: Finding
) -> None:
    assert pairing.judge_alone(INCUMBENT, found) == finding
    cancelled = replace(INCUMBENT, outcome="cancelled")
    assert pairing.judge_alone(cancelled, found) == Finding("unobserved", "cancelled")


def test_a_copy_is_waited_for_as_long_as_it_may_wait_and_run() -> None:
    assert pairing.gives_up_at(INCUMBENT, ask()) == 100 + 60 + 30 + 15
    assert pairing.gives_up_at(INCUMBENT, replace(ask(), deadline_s=3_600.0)) == 100 + 60 + 600 + 15


def test_answers_differ_in_a_character_or_in_how_they_end() -> None:
    assert not pairing.differ(INCUMBENT, CANDIDATE)
    assert pairing.differ(INCUMBENT, replace(CANDIDATE, text="yes "))
    assert pairing.differ(INCUMBENT, replace(CANDIDATE, finish_reason="length"))


def test_similarity_is_the_share_of_equal_words_in_order() -> None:
    assert pairing.similarity("a b c d", "a  b c d") == 1.0
    assert pairing.similarity("a b c d", "a b x y") == 0.5
    assert pairing.similarity("", "a") == 0.0


def test_segments_are_told_by_the_caller_or_found_in_what_the_user_said() -> None:
    request = ask(metadata={"topic": "refund", "tenant": "acme", "app": "web", "long": "x" * 65})

    assert pairing.segments_of(request) == {
        "lang": "en",
        "length_band": "under 200",
        "topic": "refund",
        "tenant": "acme",
        "tags.topic": "refund",
        "tags.tenant": "acme",
        "tags.app": "web",
    }
    assert pairing.segments_of(ask(metadata={"lang": "kok"}))["lang"] == "kok"
    assert "lang" not in pairing.segments_of(ask("42"))


def test_repeats_of_a_prompt_have_one_digest_within_a_rollout() -> None:
    first = pairing.digest("ro", ask("Where is it?"))
    assert pairing.digest("ro", ask("  where IS  it?")) == first
    assert pairing.digest("ro", ask("Where is he?")) != first
    assert pairing.digest("other", ask("Where is it?")) != first


def test_prompts_are_text_whatever_they_came_as() -> None:
    plain = GenerateRequest("r", "chat", SamplingParams(), 1.0, prompt="Once")
    tokens = replace(plain, prompt=None, prompt_token_ids=(1, 2))
    assert pairing.prompt_text(plain) == pairing.question(plain) == "Once"
    assert (pairing.prompt_text(tokens), pairing.question(tokens)) == ("[1, 2]", "")
    assert json.loads(pairing.prompt_text(ask("Hi")))[1] == {"role": "user", "content": "Hi"}
