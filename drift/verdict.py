"""What a statistic says of one metric on one segment, and the worst of several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Too little data is INCONCLUSIVE, not measured is ERROR; neither counts as a pass."""

    PASS = "PASS"  # noqa: S105 (a verdict, no password)
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    ERROR = "ERROR"


# From the worst to the best.
SEVERITY = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.PASS)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where the mean lies. Each bound alone holds at all times with probability 1 - alpha."""

    estimate: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """The e-values of both claims in natural logarithms, each with the threshold that it has to reach.

    ``harm`` speaks for "worse than the tolerance", ``safe`` for "no worse than the margin".
    """

    log_harm: float
    log_harm_threshold: float
    log_safe: float
    log_safe_threshold: float


@dataclass(frozen=True, slots=True)
class Result:
    """One metric on one segment.

    ``bounds`` and ``evidence`` are missing below the minimum sample: there is no number that one could be tempted to
    read. ``num_needed`` is how many more observations a verdict is expected to take if they come as those so far;
    none where it would not come, or has come. ``number`` is 0 for a declared segment, j for the j-th discovered one.
    """

    metric: str
    segment: tuple[tuple[str, str], ...]
    verdict: Verdict
    n: int
    tolerance: float
    margin: float
    bounds: Bounds | None
    evidence: Evidence | None
    num_needed: int | None
    sentence: str
    number: int = 0


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of ``verdicts``; of none at all INCONCLUSIVE, because no data is never a pass."""
    return min(verdicts, key=SEVERITY.index, default=Verdict.INCONCLUSIVE)
