"""Numbers -> places in a drawing: logarithmic axes, lines and points, for templates that write SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from inference.planner.curve import StepCurve
from inference.planner.hardware import Device
from inference.planner.plan import Plan, Question

WIDTH, HEIGHT = 480, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 52
_NUM_SAMPLES = 48
_ROOM = 1.6  # above the highest point, for what is written there
NUM_SERIES = 3
_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class LivePoint:
    """How a running slot computed in the last seconds."""

    slot: str
    version: str
    intensity: float
    flops_per_s: float
    batch_rows: float
    tokens_per_s: float
    mbu: float | None = None
    mfu: float | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of the grid: where it stands and what it says, empty for one that says nothing."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the drawing; ``kind`` is its style, ``points`` what SVG's polyline takes."""

    kind: str
    title: str
    points: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of the drawing; ``title`` tells it in words, ``label`` stands beside it."""

    kind: str
    title: str
    x: float
    y: float
    label: str = ""
    anchor: str = "start"


@dataclass(frozen=True, slots=True)
class Chart:
    """A whole drawing, in a box of ``WIDTH`` by ``HEIGHT``."""

    name: str
    title: str
    x_title: str
    y_title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    dots: tuple[Dot, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True)
class LogFrame:
    """Two logarithmic axes from whole powers of ten, or of two, to others."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    x_base: int = 10

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float], *, x_base: int = 10) -> LogFrame:
        """Axes that hold all of ``xs`` and ``ys``, which are positive."""
        x_low, x_high = _bounds(xs, x_base)
        return cls(x_low, x_high, *_bounds(ys, 10), x_base)

    def x(self, value: float) -> float:
        """From the left."""
        share = _share(value, self.x_low, self.x_high)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        """From the top."""
        share = _share(value, self.y_low, self.y_high)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)

    def line(self, kind: str, title: str, points: Iterable[tuple[float, float]]) -> Line:
        """A line through ``points``."""
        return Line(kind, title, " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points))

    def dot(self, kind: str, title: str, x: float, y: float, label: str = "") -> Dot:
        """A point, its label on the side that has room."""
        place = self.x(x)
        is_right = place > WIDTH * 0.72
        return Dot(kind, title, place, self.y(y), label, "end" if is_right else "start")

    def x_ticks(self) -> tuple[Tick, ...]:
        """Of the axis below."""
        return tuple(
            Tick(self.x(value), short(value))
            for value in _powers(self.x_low, self.x_high, self.x_base)
        )

    def y_ticks(self) -> tuple[Tick, ...]:
        """Of the axis on the left."""
        return tuple(
            Tick(self.y(value), short(value)) for value in _powers(self.y_low, self.y_high, 10)
        )


def draw_roofline(
    question: Question, plan: Plan, *, machine: Device | None, live: Sequence[LivePoint]
) -> Chart:
    """The roof of the device, the planned point, and what slots do now.

    Slots run on ``machine``; if the plan is for another device, its roof is drawn as well.
    """
    device, weights = question.device, question.weights
    roofs = [device]
    if live and machine is not None and machine.name != device.name:
        roofs.append(machine)
    planned = _planned(question, plan)
    xs = [*(roof.ridge(weights) * 4 for roof in roofs), *(x for x, _ in planned), 1.0]
    xs += [point.intensity for point in live]
    ys = [roof.rate(weights) for roof in roofs] + [y for _, y in planned]
    ys += [point.flops_per_s for point in live]
    ys += [roof.bandwidth * min(xs) for roof in roofs]
    frame = LogFrame.around(xs, [*ys, _ROOM * max(ys)])
    return Chart(
        name="roofline",
        title=f"Roofline of {device.title}",
        x_title="FLOP per byte",
        y_title="FLOP/s",
        x_ticks=frame.x_ticks(),
        y_ticks=frame.y_ticks(),
        lines=tuple(_roofs(frame, roofs, weights)),
        dots=tuple(_roofline_dots(frame, question, planned, live)),
    )


def draw_steps(curves: Sequence[StepCurve], device: Device) -> Chart:
    """Measured decode steps of some versions over the batch, and the least that they could take."""
    batches = [float(step.batch) for curve in curves for step in curve.steps]
    floors = [
        [(batch, 1e3 * curve.floor_s(device, batch)) for batch in _between(batches)]
        for curve in curves
    ]
    measured = [
        [(float(step.batch), 1e3 * step.seconds) for step in curve.steps] for curve in curves
    ]
    times = [ms for points in (*floors, *measured) for _, ms in points]
    frame = LogFrame.around(batches, times, x_base=2)
    kinds = [f"series-{index % NUM_SERIES + 1}" for index in range(len(curves))]
    lines = [
        *(
            frame.line(f"floor {kind}", f"floor of {curve.version}", points)
            for kind, curve, points in zip(kinds, curves, floors, strict=True)
        ),
        *(
            frame.line(f"steps {kind}", f"steps of {curve.version}", points)
            for kind, curve, points in zip(kinds, curves, measured, strict=True)
        ),
    ]
    dots = [
        frame.dot(kind, f"{curve.version}, batch {batch:g}: {ms:.2f} ms", batch, ms)
        for kind, curve, points in zip(kinds, curves, measured, strict=True)
        for batch, ms in points
    ]
    return Chart(
        name="steps",
        title="Decode steps against their floor",
        x_title="sequences in the batch",
        y_title="milliseconds",
        x_ticks=frame.x_ticks(),
        y_ticks=frame.y_ticks(),
        lines=tuple(lines),
        dots=tuple(dots),
    )


def short(value: float) -> str:
    """A number as short as people say it: 10, 0.1, 1k, 100G."""
    for size, letter in _STEPS:
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _planned(question: Question, plan: Plan) -> list[tuple[float, float]]:
    """Intensity and rate of decode steps from one sequence to the planned batch."""
    if not plan.batch:
        return []
    roof = question.roofline
    works = [roof.decode_work(batch, question.context) for batch in _between([1, plan.batch])]
    return [(work.intensity, work.flops / roof.time_s(work)) for work in works]


def _roofs(frame: LogFrame, roofs: Sequence[Device], weights: str) -> Iterator[Line]:
    for roof, kind in zip(roofs, ("roof", "other-roof"), strict=False):
        ridge, rate = roof.ridge(weights), roof.rate(weights)
        low = max(frame.x_low, frame.y_low / roof.bandwidth)
        points = [(low, low * roof.bandwidth), (ridge, rate), (max(frame.x_high, ridge), rate)]
        yield frame.line(kind, f"roof of {roof.title}", points)


def _roofline_dots(
    frame: LogFrame,
    question: Question,
    planned: Sequence[tuple[float, float]],
    live: Sequence[LivePoint],
) -> Iterator[Dot]:
    device, weights = question.device, question.weights
    ridge = device.ridge(weights)
    yield frame.dot("ridge", "ridge point", ridge, device.rate(weights), f"ridge {ridge:.1f}")
    if planned:
        first, last = planned[0], planned[-1]
        yield frame.dot(
            "start", "decode of one sequence", *first, "batch 1" if first != last else ""
        )
        yield frame.dot("planned", "planned batch", *last, "plan")
    for point in live:
        title = f"{point.slot}, {point.version}: {point.batch_rows:.1f} rows a step"
        yield frame.dot("live", title, point.intensity, point.flops_per_s, point.slot)


def _between(batches: Sequence[float]) -> list[float]:
    """Enough values from the least to the most for a smooth line."""
    low, high = min(batches), max(batches)
    if low == high:
        return [float(low)]
    ratio = high / low
    return [low * ratio ** (index / _NUM_SAMPLES) for index in range(_NUM_SAMPLES + 1)]


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def _bounds(values: Sequence[float], base: int) -> tuple[float, float]:
    low = math.floor(round(math.log(min(values), base), 9))
    high = math.ceil(round(math.log(max(values), base), 9))
    return float(base) ** low, float(base) ** max(high, low + 1)


def _powers(low: float, high: float, base: int) -> list[float]:
    first, last = round(math.log(low, base)), round(math.log(high, base))
    stride = 1 + (last - first) // 9
    return [float(base) ** power for power in range(first, last + 1, stride)]
