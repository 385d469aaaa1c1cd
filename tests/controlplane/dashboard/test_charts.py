"""Numbers to places: on logarithmic axes equal ratios are equal distances, and everything lies inside the frame."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.dashboard.charts import (
    HEIGHT,
    WIDTH,
    Chart,
    LivePoint,
    LogFrame,
    draw_roofline,
    draw_steps,
    short,
)
from inference.planner.plan import make_plan
from tests.inference.planner.reference import CALIBRATION, CURVE, MACHINE, ask

LIVE = LivePoint("slot-1", "tiny/1", intensity=5.0, flops_per_s=40e9, batch_rows=3, tokens_per_s=90)


def points_of(chart: Chart, kind: str) -> list[tuple[float, float]]:
    line = next(line for line in chart.lines if line.kind == kind)
    return [(float(x), float(y)) for x, y in (each.split(",") for each in line.points.split())]


def test_equal_ratios_are_equal_distances() -> None:
    frame = LogFrame.around([1, 1000], [10, 10_000])
    places = [frame.x(10.0**power) for power in range(4)]
    gaps = [after - before for before, after in pairwise(places)]
    assert gaps == pytest.approx([gaps[0]] * 3, abs=0.2)
    assert frame.y(10) > frame.y(100), "SVG counts from the top"
    assert [tick.text for tick in frame.x_ticks()] == ["1", "10", "100", "1k"]


def test_a_batch_axis_counts_in_powers_of_two() -> None:
    frame = LogFrame.around([1, 32], [1, 10], x_base=2)
    assert [tick.text for tick in frame.x_ticks()] == ["1", "2", "4", "8", "16", "32"]


def test_the_roof_bends_at_the_ridge_and_the_plan_lies_on_it() -> None:
    question = ask()
    chart = draw_roofline(question, make_plan(question), machine=None, live=())
    roof = points_of(chart, "roof")
    dots = {dot.kind: dot for dot in chart.dots}
    assert roof[1] == (dots["ridge"].x, dots["ridge"].y)
    assert roof[1][1] == roof[2][1], "flat beyond"
    assert dots["ridge"].label == "ridge 200.6"
    # The planned batch is bound by memory: on the slope between its first point and the ridge.
    (x0, y0), (x1, y1) = roof[:2]
    on_slope = y0 + (y1 - y0) * (dots["planned"].x - x0) / (x1 - x0)
    assert dots["planned"].y == pytest.approx(on_slope, abs=0.5)
    assert dots["start"].x < dots["planned"].x < dots["ridge"].x


def test_live_points_bring_the_roof_that_they_stand_under() -> None:
    question, machine = ask(), CALIBRATION.device()
    alone = draw_roofline(question, make_plan(question), machine=machine, live=())
    assert [line.kind for line in alone.lines] == ["roof"]
    chart = draw_roofline(question, make_plan(question), machine=machine, live=[LIVE])
    assert [line.kind for line in chart.lines] == ["roof", "other-roof"]
    live = next(dot for dot in chart.dots if dot.kind == "live")
    (x0, y0), (x1, y1), _ = points_of(chart, "other-roof")
    below = y0 + (y1 - y0) * (live.x - x0) / (x1 - x0) if live.x < x1 else y1
    assert live.y >= below
    assert live.label == "slot-1"
    assert "tiny/1: 3.0 rows" in live.title


@given(intensity=st.floats(1e-3, 1e5), flops=st.floats(1e6, 1e15), params=st.floats(1e6, 1e12))
def test_everything_lies_inside_the_drawing(intensity: float, flops: float, params: float) -> None:
    question = ask(shape=replace(ask().shape, params=params))
    live = replace(LIVE, intensity=intensity, flops_per_s=flops)
    chart = draw_roofline(question, make_plan(question), machine=CALIBRATION.device(), live=[live])
    places = [place for line in chart.lines for place in points_of(chart, line.kind)]
    places += [(dot.x, dot.y) for dot in chart.dots]
    for x, y in places:
        assert chart.left <= x <= chart.right <= WIDTH
        assert chart.top <= y <= chart.bottom <= HEIGHT
    assert 2 <= len(chart.y_ticks) <= 11


def test_measured_steps_of_two_versions_share_one_drawing() -> None:
    other = replace(CURVE, version="tiny/2", weights="bf16")
    chart = draw_steps([CURVE, other], MACHINE)
    assert [line.kind for line in chart.lines] == [
        "floor series-1", "floor series-2", "steps series-1", "steps series-2",
    ]  # fmt: skip
    assert len(chart.dots) == 4
    assert chart.dots[0].title == "tiny/1, batch 1: 10.00 ms"
    assert points_of(chart, "steps series-1")[0] == (chart.dots[0].x, chart.dots[0].y)


@pytest.mark.parametrize(
    ("value", "text"), [(0.1, "0.1"), (10, "10"), (1e3, "1k"), (1e11, "100G"), (1e15, "1P")]
)
def test_numbers_are_as_short_as_people_say_them(value: float, text: str) -> None:
    assert short(value) == text
