"""Engines in processes of their own that take turns: a real one of a few lines, which answers as it is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bench.peers import comparison, environments, process
from tests.bench.peers.comparison import CHANGED, MANY, SINGLE, compare, rows
from tests.bench.peers.environments import PEERS, PeerUnavailable, install
from tests.bench.peers.process import EngineProcess
from tests.bench.peers.runners.wire import Setup
from tests.bench.traffic import Asked
from tests.bench.workload import Workload

ECHO = "tests.bench.peers.echo_runner"
WORKLOAD = Workload(token_ids=range(1000, 3000), num_requests=4, longest=20)


def start(name: str, style: str) -> EngineProcess:
    setup = Setup("", style, "", num_threads=1, num_requests=4, max_tokens=64)
    return EngineProcess(name, Path(sys.executable), ECHO, setup)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and environments are this test's, and nobody's threads spin."""
    monkeypatch.setattr(process, "HOME", tmp_path)
    monkeypatch.setattr(environments, "HOME", tmp_path)
    monkeypatch.setattr(comparison, "PAUSE_S", 0.0)


@pytest.fixture
def engines() -> Iterator[dict[str, EngineProcess]]:
    with ExitStack() as stack:
        styles = {"tatkal int4": "fast", "steady": "slow", "fickle": "slow fickle"}
        yield {name: stack.enter_context(start(name, style)) for name, style in styles.items()}


def test_engines_take_turns_and_changed_tokens_are_counted(
    engines: dict[str, EngineProcess],
) -> None:
    said: list[str] = []
    found = compare(engines, WORKLOAD, num_rounds=2, num_alone=3, say=said.append)

    assert [len(values) for values in found.values(SINGLE).values()] == [2, 2, 2]
    assert found.changed == {"tatkal int4": (0, 3), "steady": (0, 3), "fickle": (3, 3)}
    assert len(said) == 2
    table = list(rows(found, ours="tatkal int4"))
    for measured in (SINGLE, MANY.format(4)):
        (ratio,) = [row for row in table if row.measured == measured and "/" in row.engine]
        assert min(ratio.values) > 1.5  # the echo is told to be two times as fast
    assert [row.values for row in table if row.measured == CHANGED] == [[0], [0], [3]]


def test_a_peer_that_breaks_off_is_left_out_and_ours_must_not() -> None:
    said: list[str] = []
    with start("tatkal int4", "fast") as ours, start("short", "short") as peer:
        engines = {"tatkal int4": ours, "short": peer}
        found = compare(engines, WORKLOAD, num_rounds=1, num_alone=1, say=said.append)
        assert list(found.measures) == ["tatkal int4"]
        assert list(rows(found, ours="tatkal int4"))
        assert said[0].startswith("short: left out, because short was asked for")
        with pytest.raises(PeerUnavailable):
            compare({"tatkal int4": peer}, WORKLOAD, num_rounds=1, num_alone=1, say=said.append)


def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(PeerUnavailable, match="no such weights"):
        start("broken", "broken")


def test_an_answer_of_another_length_is_no_answer() -> None:
    with (
        start("short", "short") as engine,
        pytest.raises(PeerUnavailable, match="5 tokens and gave 4"),
    ):
        engine.run([Asked((1, 2), 5)])


def test_an_engine_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "RUN_S", 0.2)
    with start("late", "hang") as engine, pytest.raises(PeerUnavailable, match="no answer within"):
        engine.run([Asked((1, 2), 5)])


def test_what_must_be_compiled_is_left_out_unless_it_is_asked_for() -> None:
    peer = PEERS["llama.cpp-native"]
    with pytest.raises(PeerUnavailable, match="--compile"):
        install(peer, may_compile=False)
