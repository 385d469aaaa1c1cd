"""Scorers say which answer is better, and never learn whose it is."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from controlplane.rollouts import scorers
from controlplane.rollouts.scorers import (
    FunctionScorer,
    HttpJudge,
    InvalidScorer,
    Question,
    ScorerFailed,
    ask,
    is_turned,
    load_scorer,
)

LONGER = "tests.controlplane.rollouts.test_scorers:prefer_longer"
QUESTION = Question("q1", "Why?", "a", "bb")


def prefer_longer(prompt: str, answer_a: str, answer_b: str) -> float:
    """A function that a setting may name."""
    if prompt == "raise":
        raise KeyError(prompt)
    return float("nan") if prompt == "nan" else float(len(answer_b) > len(answer_a)) * 2 - 1


class Judge:
    """A judge behind HTTP that answers from a script, and remembers what it was asked."""

    def __init__(self) -> None:
        self.script: list[tuple[int, bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                judge.asked.append(json.loads(self.rfile.read(size)))
                judge.tokens.append(self.headers.get("authorization", ""))
                status, body = judge.script.pop(0)
                self.send_response(status)
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/judge"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join(5)
        self.server.server_close()


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setattr(scorers, "PAUSES_S", (0.0, 0.0))
    judge = Judge()
    yield judge
    judge.stop()


@pytest.fixture
def scorer(judge: Judge) -> Iterator[HttpJudge]:
    scorer = HttpJudge(judge.url, token="secret", timeout_s=5)
    yield scorer
    scorer.close()


def preference(value: object) -> tuple[int, bytes]:
    return 200, json.dumps({"preference": value}).encode()


def test_a_judge_is_asked_blind_and_believed(judge: Judge, scorer: HttpJudge) -> None:
    judge.script = [preference(0.5)]

    assert scorer.prefer(QUESTION) == 0.5

    assert judge.asked == [{"id": "q1", "prompt": "Why?", "answer_a": "a", "answer_b": "bb"}]
    assert judge.tokens == ["Bearer secret"]
    assert "secret" not in scorer.name


def test_a_judge_that_is_busy_is_asked_again_and_not_for_ever(
    judge: Judge, scorer: HttpJudge
) -> None:
    judge.script = [(503, b""), (429, b""), preference(-1)]
    assert scorer.prefer(QUESTION) == -1.0
    judge.script = [(500, b"")] * 4
    with pytest.raises(ScorerFailed, match="status 500"):
        scorer.prefer(QUESTION)
    assert len(judge.asked) == 6


@pytest.mark.parametrize(
    "reply",
    [
        *((400, b"{}"), (302, b"{}"), (200, b"no json"), (200, b"[]"), (200, b"{}")),
        *map(preference, (2, "1", True, None, [1])),
        (200, b'{"preference": NaN}'),
        (200, b'{"preference": 1, "x": "' + b"x" * 70_000 + b'"}'),
    ],
)
def test_what_is_no_preference_fails_at_once(
    judge: Judge, scorer: HttpJudge, reply: tuple[int, bytes]
) -> None:
    judge.script = [reply]
    with pytest.raises(ScorerFailed):
        scorer.prefer(QUESTION)
    assert len(judge.asked) == 1


def test_a_judge_that_is_not_there_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "PAUSES_S", (0.0, 0.0))
    scorer = HttpJudge("http://127.0.0.1:1/judge", token="", timeout_s=1)
    with pytest.raises(ScorerFailed, match=r"127\.0\.0\.1"):
        scorer.prefer(QUESTION)
    scorer.close()


def test_a_function_is_named_by_its_module_and_may_fail() -> None:
    scorer = load_scorer(LONGER)
    assert isinstance(scorer, FunctionScorer)
    assert (scorer.prefer(QUESTION), scorer.name) == (1.0, LONGER)
    for prompt in ("raise", "nan"):
        with pytest.raises(ScorerFailed):
            scorer.prefer(Question("q", prompt, "a", "b"))


@pytest.mark.parametrize(
    "spec", ["nowhere:prefer", "json:nothing", "json:__doc__", "x y", "http://"]
)
def test_a_setting_that_names_no_scorer_is_refused(spec: str) -> None:
    with pytest.raises(InvalidScorer, match="TATKAL_SCORER"):
        load_scorer(spec)


def test_no_setting_is_no_scorer() -> None:
    assert load_scorer("") is None


class Recorder:
    """Prefers the answer ``good``, and remembers which place it had."""

    name = "recorder"

    def __init__(self) -> None:
        self.questions: list[Question] = []

    def prefer(self, question: Question) -> float:
        self.questions.append(question)
        return 1.0 if question.answer_b == "good" else -1.0


def test_the_order_is_drawn_by_the_pair_and_the_score_is_the_candidates() -> None:
    scorer = Recorder()
    names = [f"request{number} shadow" for number in range(200)]

    for name in names:
        assert ask(scorer, pair_id=name, prompt="p", incumbent="good", candidate="bad") == -1.0
        assert ask(scorer, pair_id=name, prompt="p", incumbent="bad", candidate="good") == 1.0

    turned = [question.answer_a == "bad" for question in scorer.questions[::2]]
    assert turned == [is_turned(name) for name in names]
    assert 70 <= sum(turned) <= 130
    told = {text for each in scorer.questions for text in (each.id, each.prompt)}
    assert not any("shadow" in text or "request" in text for text in told)
    assert len({each.id for each in scorer.questions}) == 200
