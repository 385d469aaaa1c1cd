"""`tatkal rollout …` against the real API: what it sends, what it says, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import pytest
from django.core.handlers.wsgi import WSGIHandler

from controlplane.api import rollout_reads as read_views
from controlplane.api import rollouts as views
from controlplane.cli import main as cli
from controlplane.cli import rollouts
from controlplane.cli.client import ApiError, ControlClient, RolloutInfo
from controlplane.cli.run import CommandFailed
from controlplane.rollouts.policies import save_policy
from inference.queue import Queue
from tests.controlplane.cli.test_main import RUN, Clock
from tests.controlplane.rollouts.world import DOCUMENT, World
from tests.factories import NOW, make_control_token

pytestmark = pytest.mark.django_db

Tatkal = Callable[..., tuple[int, str, str]]


@pytest.fixture
def world(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> World:
    for module in (views, read_views):
        monkeypatch.setattr(module, "connection", lambda: queue)
    save_policy(name="test", document=DOCUMENT, actor="ada", now=NOW)
    return World(queue)


@pytest.fixture
def tatkal(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Tatkal:
    """The command, with an engineer's token; exit status, what it says, and its complaints."""
    run = replace(RUN, control_token=make_control_token("engineer"))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(asdict(run)))
    transport = httpx.WSGITransport(app=WSGIHandler())

    def connect(url: str, token: str) -> ControlClient:
        return ControlClient(url, token, transport=transport)

    monkeypatch.setattr(rollouts, "ControlClient", connect)

    def call(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["--run", str(path), "rollout", *arguments])
        return status, *capsys.readouterr()

    return call


def test_a_rollout_is_started_and_told(world: World, tatkal: Tatkal) -> None:
    status, told, _ = tatkal("start", "chat", "tiny/2", "--policy", "test", "--reason", "smaller")
    key = world.key
    assert status == 0
    assert told.splitlines() == [
        f"{key} tiny/2 on chat: preparing, step 0 of 3, gates INCONCLUSIVE. Slots load and warm the candidate.",
        f"Watch it with: tatkal rollout watch {key}",
    ]
    assert world.rollout.reason == "smaller"
    status, _, error = tatkal("start", "chat", "tiny/2", "--policy", "test")
    assert (status, "is active on endpoint 'chat'" in error) == (1, True)


@pytest.mark.parametrize("by", ["id", "endpoint"])
def test_status_shows_steps_and_gates(world: World, tatkal: Tatkal, by: str) -> None:
    world.start()
    world.hold("tiny/2")
    world.tick()
    _, told, _ = tatkal("status", world.key if by == "id" else "chat")
    lines = told.splitlines()
    assert f"{world.key} tiny/2 on chat: progressing, step 1 of 3" in lines[0]
    assert [line.split()[-1] for line in lines[1:5]] == ["done", "0%", "ahead", "ahead"]
    assert lines[5].split(maxsplit=1) == ["INCONCLUSIVE", "nothing was counted yet"]
    assert tatkal("status", "nowhere")[0] == 1


def test_actions_are_sent_with_their_reason(world: World, tatkal: Tatkal) -> None:
    world.start()
    world.hold("tiny/2")
    world.tick()
    assert "paused" in tatkal("pause", "chat", "--reason", "lunch")[1]
    assert "progressing" in tatkal("resume", "chat")[1]
    assert "Only the role approver" in tatkal("promote", "chat", "--reason", "x")[2]
    assert "there is nothing to try again" in tatkal("retry", "chat")[2]
    status, told, _ = tatkal("rollback", world.key, "--reason", "trains", "--force")
    assert (status, told.endswith("gates INCONCLUSIVE. Trains.\n")) == (0, True)
    world.lose("tiny/2")
    assert "preparing" in tatkal("retry", "chat", "--reason", "mended")[1]
    assert world.rollout.attempt == 2
    assert "aborted" in tatkal("abort", "chat")[1]


def info(state: str, *, why: str = "Because.", is_active: bool = True) -> RolloutInfo:
    return RolloutInfo("k", "chat", "tiny/2", state, is_active, 0, 0, "PASS", why, ())


def watch(answers: Iterator[RolloutInfo | ApiError], deadline_s: float = 600) -> list[str]:
    clock, said = Clock(), list[str]()

    def find() -> RolloutInfo:
        answer = next(answers)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    rollouts.watch(find, deadline_s=deadline_s, say=said.append, clock=clock, sleep=clock.sleep)
    return said


def test_watching_says_what_changes_and_waits_for_a_server_that_restarts() -> None:
    answers: list[RolloutInfo | ApiError] = [
        info("preparing"), info("preparing"), ApiError(0, "refused"), ApiError(503, "away"),
        info("progressing"), info("promoted", is_active=False), info("never asked"),
    ]  # fmt: skip
    assert [line.split(": ")[1].split(",")[0] for line in watch(iter(answers))] == [
        "preparing", "progressing", "promoted",
    ]  # fmt: skip


def test_watching_ends_with_the_deadline_a_refusal_or_a_server_that_stays_away() -> None:
    with pytest.raises(CommandFailed, match="has not ended after 10 s"):
        watch(iter([info("paused")] * 100), deadline_s=10)
    with pytest.raises(ApiError, match="no rollout"):
        watch(iter([info("paused"), ApiError(404, "no rollout")]))
    with pytest.raises(ApiError, match="refused"):
        watch(iter([info("paused"), *[ApiError(0, "refused")] * 100]))


def test_an_end_that_is_no_promotion_fails_the_command(world: World, tatkal: Tatkal) -> None:
    world.start()
    tatkal("abort", "chat")
    status, _, error = tatkal("watch", "chat")
    assert (status, error) == (1, "tatkal: tiny/2 was not promoted: aborted.\n")
