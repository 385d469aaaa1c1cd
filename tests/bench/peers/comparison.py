"""Engines that take turns at the same requests, and the rows that come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from tests.bench.peers.environments import PeerUnavailable
from tests.bench.peers.process import EngineProcess
from tests.bench.table import Row, best_of, ratios
from tests.bench.traffic import Answer, Asked, tokens_per_s
from tests.bench.workload import Workload

OURS = "tatkal"
PAUSE_S = 0.5  # threads of the one before may still be spinning
Measures = dict[str, list[float]]


@dataclass(slots=True)
class Comparison:
    """What each engine, by name, reached in each round, by measure; and how many requests changed their tokens."""

    measures: dict[str, Measures]
    changed: dict[str, tuple[int, int]]

    def values(self, measure: str) -> dict[str, list[float]]:
        """One measure of all engines."""
        return {name: each[measure] for name, each in self.measures.items()}


SINGLE = "single stream, tokens/s"
MANY = "{} requests at once, tokens/s"
TTFT, TTFT_MAX = "... TTFT median, s", "... TTFT longest, s"
TPOT = "... TPOT median, ms"
CHANGED = "tokens change with the batch"


def compare(
    engines: Mapping[str, EngineProcess],
    workload: Workload,
    *,
    num_rounds: int,
    num_alone: int,
    say: Callable[[str], None],
) -> Comparison:
    """Alternate over ``engines``, whoever begins being another one each round, after a request that only warms up."""
    found = Comparison({name: {} for name in engines}, dict.fromkeys(engines, (0, 0)))
    for name in list(engines):
        with _leaving_out(name, found, say):
            engines[name].run([workload.single(seed=0)])
    for number in range(1, num_rounds + 1):
        asked = workload.requests(seed=number)
        names = list(found.measures)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE_S)
            with _leaving_out(name, found, say):
                measured, answers = _measure(engines[name], workload.single(seed=number), asked)
                for measure, value in measured.items():
                    found.measures[name].setdefault(measure, []).append(value)
                if number == num_rounds:
                    found.changed[name] = _count_changed(engines[name], asked[:num_alone], answers)
        say(f"round {number} of {num_rounds}: " + _tell_round(found, len(asked)))
    return found


@contextmanager
def _leaving_out(name: str, found: Comparison, say: Callable[[str], None]) -> Iterator[None]:
    """A peer that breaks off is out of the comparison, with the reason; ours must not."""
    try:
        yield
    except PeerUnavailable as reason:
        if name.startswith(OURS):
            raise
        say(f"{name}: left out, because {reason}")
        del found.measures[name], found.changed[name]


def _measure(
    engine: EngineProcess, single: Asked, asked: Sequence[Asked]
) -> tuple[dict[str, float], list[Answer]]:
    alone = engine.run([single])
    answers = engine.run(asked)
    return {
        SINGLE: tokens_per_s(alone),
        MANY.format(len(asked)): tokens_per_s(answers),
        TTFT: median(each.ttft_s for each in answers),
        TTFT_MAX: max(each.ttft_s for each in answers),
        TPOT: 1000 * median(each.tpot_s for each in answers),
    }, answers


def _count_changed(
    engine: EngineProcess, asked: Sequence[Asked], batched: Sequence[Answer]
) -> tuple[int, int]:
    """How many of ``asked`` are answered otherwise when they are alone."""
    alone = [engine.run([each])[0] for each in asked]
    pairs = zip(alone, batched, strict=False)
    return sum(one.token_ids != other.token_ids for one, other in pairs), len(asked)


def _tell_round(found: Comparison, num_requests: int) -> str:
    values = found.values(SINGLE), found.values(MANY.format(num_requests))
    return ", ".join(
        f"{name} {values[0][name][-1]:.0f} | {values[1][name][-1]:.0f}" for name in values[0]
    )


def rows(found: Comparison, *, ours: str) -> Iterator[Row]:
    """The rows of the comparison; ``ours`` is set against the best peer of each throughput."""
    measures = next(iter(found.measures.values()))
    for measure in measures:
        values = found.values(measure)
        form = ".2f" if measure in (TTFT, TTFT_MAX) else ".1f"
        for name, each in values.items():
            yield Row(measure, name, each, form)
        peers = {name: each for name, each in values.items() if not name.startswith(OURS)}
        if peers and measure.endswith("tokens/s"):
            best = best_of(peers)
            yield Row(
                measure,
                f"{ours} / {best}",
                ratios(values[ours], peers[best]),
                ".2f",
                "the best peer",
            )
    for name, (num_changed, num_asked) in found.changed.items():
        yield Row(
            CHANGED, name, [num_changed], ".0f", f"of {num_asked}, alone against in the batch"
        )
