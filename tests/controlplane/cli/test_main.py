"""`tatkal ready` waits for a real answer and says what it waits for; other commands print tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli import main as cli
from controlplane.cli import moves
from controlplane.cli.client import (
    ApiError,
    EndpointInfo,
    ModelInfo,
    MoveInfo,
    RoleInfo,
    SlotInfo,
    VersionInfo,
)
from controlplane.cli.run import CommandFailed, Run

RUN = Run(
    gateway_url="http://127.0.0.1:8000",
    control_url="http://127.0.0.1:8001",
    api_key="sk-tatkal-k-secret",
    control_token="ct-tatkal-t-secret",
    admin_user="admin",
    admin_password="pass",
    endpoint="smollm2",
    logs="/var/logs",
)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def endpoint(*slots: SlotInfo, is_ready: bool = False) -> EndpointInfo:
    role = RoleInfo("live", "tiny/1", is_ready, slots)
    return EndpointInfo("smollm2", 1, True, 0, (role,))


def wait(
    answers: Iterator[str | ApiError], *, find: Callable[[], EndpointInfo] = endpoint
) -> tuple[float, list[str]]:
    clock, said = Clock(), list[str]()

    def complete() -> str:
        answer = next(answers)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    seconds = cli.wait_until_ready(
        RUN,
        deadline_s=60,
        say=said.append,
        complete=complete,
        find=find,
        clock=clock,
        sleep=clock.sleep,
    )
    return seconds, said


def test_it_ends_with_the_first_real_text_and_says_what_it_waited_for() -> None:
    answers: list[str | ApiError] = [
        ApiError(0, "refused"),
        ApiError(401, "401"),
        ApiError(503, "503"),
        " ",
        "Hello",
    ]
    seconds, said = wait(iter(answers), find=lambda: endpoint(SlotInfo("s", "loading", "")))
    assert seconds == pytest.approx(4 * cli.POLL_S)
    assert [line.strip() for line in said] == [
        "waiting: the gateway does not answer yet",
        "waiting: the gateway does not know the API key yet",
        "waiting: tiny/1 is loading",
        "waiting: the answer was empty",
    ]


def test_the_same_reason_is_said_once_and_then_now_and_again() -> None:
    refusals = [ApiError(0, "refused")] * 25
    _, said = wait(iter([*refusals, "Hello"]))
    assert said[0].strip() == "waiting: the gateway does not answer yet"
    assert len(said) == 3
    assert all("still waiting" in line for line in said[1:])


@pytest.mark.parametrize(
    ("error", "found", "log"),
    [
        (ApiError(0, "refused"), endpoint(), "gateway.log"),
        (ApiError(503, "503"), endpoint(), "engine-*.log"),
        (ApiError(503, "503"), endpoint(SlotInfo("s", "failed", "no memory")), "engine-*.log"),
    ],
)
def test_after_the_deadline_it_names_the_log_to_read(
    error: ApiError, found: EndpointInfo, log: str
) -> None:
    with pytest.raises(CommandFailed, match=re.escape(f"/var/logs/{log}")):
        wait(iter([error] * 1000), find=lambda: found)


def test_a_failed_load_is_told_with_its_reason() -> None:
    failed = endpoint(SlotInfo("s", "failed", "weights are damaged"))
    with pytest.raises(CommandFailed, match="tiny/1 is failed: weights are damaged"):
        wait(iter([ApiError(503, "503")] * 1000), find=lambda: failed)


def test_with_the_control_process_away_the_gateways_words_are_enough() -> None:
    def find() -> EndpointInfo:
        raise ApiError(0, "nobody there")

    _, said = wait(iter([ApiError(503, "503 No slot."), "Hello"]), find=find)
    assert "503 No slot." in said[0]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(asdict(RUN) | {"of a later release": 1}))
    return path


def test_ready_prints_addresses_credentials_and_a_curl(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "complete", lambda *args: "Hello")
    assert cli.main(["--run", str(run_file), "ready"]) == 0
    output = capsys.readouterr().out
    assert "\nReady after" in output
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in output
    assert "-H 'Authorization: Bearer sk-tatkal-k-secret'" in output
    assert "admin / pass" in output
    body = output.split("-d '")[1].split("'")[0]
    assert json.loads(body)["model"] == "smollm2"


def test_ready_fails_visibly(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: str) -> str:
        raise ApiError(0, "refused")

    monkeypatch.setattr(cli, "complete", refuse)
    assert cli.main(["--run", str(run_file), "ready", "--deadline", "0"]) == 1
    assert "Read /var/logs/gateway.log" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"gateway_url": "x"}'])
def test_a_damaged_run_file_is_named_with_the_mend(
    run_file: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(text)
    assert cli.main(["--run", str(run_file), "models"]) == 1
    error = capsys.readouterr().err
    assert str(run_file) in error
    assert "make run" in error


def test_without_a_run_it_says_how_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--run", str(tmp_path / "run.json"), "models"]) == 1
    assert "make run" in capsys.readouterr().err


class FakeControl:
    """What the control API would say."""

    def __init__(self, url: str, token: str) -> None:
        assert (url, token) == (RUN.control_url, RUN.control_token)

    def models(self) -> list[ModelInfo]:
        return [ModelInfo("tiny", "A tiny one.")]

    def versions(self, *, model: str) -> list[VersionInfo]:
        assert model == "tiny"
        pending = VersionInfo("tiny/2", "pending", "", "bfloat16", "", None, None, None)
        ready = VersionInfo("tiny/1", "ready", "", "bfloat16", "none", 2048, 135, 3 * 2**20)
        return [pending, ready]

    def endpoints(self) -> list[EndpointInfo]:
        ready = endpoint(SlotInfo("engine-0", "ready", "", "native/1 avx512-vnni"), is_ready=True)
        return [ready, EndpointInfo("chat", 2, False, 0, None)]


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (["models"], ["MODEL  DESCRIPTION", "tiny   A tiny one."]),
        (
            ["versions", "--model", "tiny"],
            [
                "VERSION  STATE    DTYPE     QUANTIZATION  CONTEXT  PARAMETERS  MIB",
                "tiny/2   pending  bfloat16  -             -        -           -",
                "tiny/1   ready    bfloat16  none          2048     135         3.0",
            ],
        ),
        (
            ["endpoints"],
            [
                "ENDPOINT  ROLE  VERSION  GENERATION         READY    SLOTS",
                "smollm2   live  tiny/1   1                  yes      engine-0: ready (native/1 avx512-vnni)",
                "chat      -     -        2 (not published)  unknown  Redis is away",
            ],
        ),
    ],
)
def test_tables(
    command: list[str],
    lines: list[str],
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "ControlClient", FakeControl)
    assert cli.main(["--run", str(run_file), *command]) == 0
    assert capsys.readouterr().out.splitlines() == lines


class FakeMoves:
    """What the control API would do, and what it was asked for."""

    asked: list[tuple[str, tuple[str | None, ...], dict[str, Any]]] = []
    done = MoveInfo(3, "tiny/2", "tiny/1", True, True, 4, 1, 12.4)

    def __init__(self, url: str, token: str) -> None:
        self.asked.clear()

    def promote(self, *names: str, **options: Any) -> MoveInfo:
        self.asked.append(("promote", names, options))
        return self.done

    def rollback(self, *names: str, **options: Any) -> MoveInfo:
        self.asked.append(("rollback", names, options))
        return replace(self.done, changed=False)

    def set_candidate(self, *names: str | None, **options: Any) -> EndpointInfo:
        self.asked.append(("candidate", names, options))
        return EndpointInfo("chat", 4, True, options["canary_bp"] or 0, None)


@pytest.mark.parametrize(
    ("command", "asked", "line"),
    [
        (
            ["promote", "chat", "tiny/2", "--reason", "better", "--expect", "2"],
            ("promote", ("chat", "tiny/2"), {"reason": "better", "expected_generation": 2}),
            "chat: tiny/2 is live at generation 3, applied in 12 ms; 4 waiting requests moved, "
            "1 still run on a version without a route",
        ),
        (
            ["rollback", "chat", "--from", "tiny/3"],
            ("rollback", ("chat",), {"leave": "tiny/3", "to": None, "reason": "", "force": False}),
            "chat: tiny/2 is live at generation 3; it was so already",
        ),
        (
            ["candidate", "chat", "tiny/3", "--canary", "2.5"],
            ("candidate", ("chat", "tiny/3"), {"canary_bp": 250, "reason": ""}),
            "chat: generation 4, candidate tiny/3 with 2.5 % of the traffic",
        ),
        (
            ["candidate", "chat", "none"],
            ("candidate", ("chat", None), {"canary_bp": None, "reason": ""}),
            "chat: generation 4, candidate none with 0 % of the traffic",
        ),
    ],
)
def test_moves_are_sent_and_told(
    command: list[str],
    asked: tuple[str, tuple[str, ...], dict[str, Any]],
    line: str,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(moves, "ControlClient", FakeMoves)
    assert cli.main(["--run", str(run_file), *command]) == 0
    assert FakeMoves.asked == [asked]
    assert capsys.readouterr().out == line + "\n"


def test_a_share_that_cannot_be_is_refused_before_anything_is_sent(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moves, "ControlClient", FakeMoves)
    command = ["candidate", "chat", "tiny/3", "--canary", "101"]
    assert cli.main(["--run", str(run_file), *command]) == 1
    assert "from 0 to 100" in capsys.readouterr().err
