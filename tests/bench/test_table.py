"""Medians, ranges and ratios, as they are printed."""

from __future__ import annotations

import os

import pytest

from tests.bench.table import Row, best_of, ratios, render, tell_load


def test_a_row_has_the_median_and_the_range() -> None:
    assert Row("speed", "ours", [3.0, 1.0, 2.0]).cells == ("speed", "ours", "2.0", "1.0 to 3.0", "")
    assert Row("speed", "ours", [3.0], ".0f", "note").cells[2:] == ("3", "1 round", "note")
    assert Row("speed", "ours", []).cells[2] == "-"


def test_ratios_are_formed_round_by_round() -> None:
    assert ratios([4.0, 9.0], [2.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="argument 2"):
        ratios([1.0], [1.0, 2.0])


def test_the_best_peer_has_the_highest_median() -> None:
    assert best_of({"one": [1.0, 2.0, 90.0], "two": [3.0, 3.0, 3.0]}) == "two"


def test_a_measure_is_named_once_and_columns_align() -> None:
    lines = list(render([Row("speed", "ours", [1.0]), Row("speed", "a peer", [22.0])]))
    assert [line.split()[0] for line in lines] == ["measured", "speed", "a"]
    assert lines[1].index("1.0") == lines[2].index("22.0")


@pytest.mark.parametrize(("load", "num_lines"), [(0.1, 1), (3.0, 2)])
def test_a_busy_machine_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, load: float, num_lines: int
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    lines = list(tell_load())
    assert len(lines) == num_lines
    assert all("WARNING" in line for line in lines[1:])
