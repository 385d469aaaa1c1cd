"""The one table of a benchmark: what was measured of which engine, the median over the rounds and their range."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

BUSY_LOAD = 0.5  # processes that ran or waited in the last minute, before anything was measured
HEAD = ("measured", "engine", "median", "range", "")

FORMULAS = (
    "Formulas, per request of n tokens: TTFT = first token - send, so waiting in a queue is in it; "
    "TPOT = (latency - TTFT) / (n - 1); latency = last token - send.",
    "tokens/s = all output tokens / (last token of all - first send), so prefill is in it. "
    "Goodput = requests that kept both limits / the same seconds.",
    "Ratios are formed within each round; the table has their median and range. Compare numbers of one run only.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line: ``values`` has one number per round; ``form`` is how a number is written."""

    measured: str
    engine: str
    values: Sequence[float]
    form: str = ".1f"
    note: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """What the columns of ``HEAD`` say."""
        if not self.values:
            return (self.measured, self.engine, "-", "-", self.note)
        low, high = min(self.values), max(self.values)
        spread = f"{low:{self.form}} to {high:{self.form}}" if len(self.values) > 1 else "1 round"
        median = f"{statistics.median(self.values):{self.form}}"
        return (self.measured, self.engine, median, spread, self.note)


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(ours, others, strict=True)]


def best_of(engines: Mapping[str, Sequence[float]]) -> str:
    """The engine with the highest median."""
    return max(engines, key=lambda name: statistics.median(engines[name]))


def render(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of the table; a measure is named once."""
    cells = [HEAD, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
    before = ""
    for line in cells:
        shown = ("" if line[0] == before else line[0], *line[1:])
        before = line[0]
        yield "  ".join(
            cell.ljust(width) for cell, width in zip(shown, widths, strict=True)
        ).rstrip()


def tell_load() -> Iterator[str]:
    """The load of the machine, and a warning where others use it."""
    load = os.getloadavg()[0]
    yield f"load average {load:.2f} on {os.cpu_count()} cores"
    if load > BUSY_LOAD:
        yield (
            f"WARNING: the machine is busy (load {load:.2f} > {BUSY_LOAD}). These numbers are no result: ratios may be "
            "off by a factor, absolute ones by more. Measure again on an idle machine."
        )
