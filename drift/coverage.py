"""What was never observed: how much of the intended comparison took place, and whether what is missing is like the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, fisher_exact

from drift.segments import Columns, Segment

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]

ALPHA = 0.001
LEAST_DIFFERENCE = 0.05
LEAST_EXPECTED = 5.0


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Drops that depend on something. ``share`` are dropped in the segment, ``rest`` outside of it."""

    key: str
    segment: Segment
    share: float
    rest: float
    p_value: float


def coverage_of(dropped: Mask, intended: Mask) -> float:
    """The share of the intended observations that were made; all of them where none was intended."""
    num_intended = int(intended.sum())
    return 1 - int((dropped & intended).sum()) / num_intended if num_intended else 1.0


def find_informative_dropping(
    columns: Columns, dropped: Mask, intended: Mask, incumbent_loss: Floats
) -> list[Imbalance]:
    """Keys whose values lose different shares, and whether drops hit what the incumbent does badly.

    A finding is reported and gates nothing: paired differences stay fair, yet they speak for what was observed alone.
    Pearson's chi-square per key with Holm's correction; Fisher's exact test for the incumbent's losses. A difference
    below 5 points is not reported, however certain.

    Sources: Pearson (1900), Phil. Mag. 50, 157-175; Holm (1979), Scand. J. Statist. 6, 65-70.
    """
    lost, kept = dropped & intended, intended & ~dropped
    if not lost.any() or not kept.any():
        return []
    found = [
        imbalance
        for key, column in sorted(columns.items())
        if (imbalance := of_key(key, column.codes, column.names, lost, intended)) is not None
    ]
    found.append(_of_losses(lost, intended, incumbent_loss > 0))
    found.sort(key=lambda imbalance: (imbalance.p_value, imbalance.key))
    significant = []
    for rank, imbalance in enumerate(found):
        if imbalance.p_value > ALPHA / (len(found) - rank):
            break
        significant.append(imbalance)
    return [i for i in significant if abs(i.share - i.rest) >= LEAST_DIFFERENCE]


def of_key(
    key: str, codes: NDArray[np.int32], names: tuple[str, ...], lost: Mask, intended: Mask
) -> Imbalance | None:
    """The test over all values of a key, with the value that departs most as its example; none if all are too rare."""
    sizes = np.bincount(codes[intended & (codes >= 0)], minlength=len(names))
    losses = np.bincount(codes[lost & (codes >= 0)], minlength=len(names))
    overall = losses.sum() / max(int(sizes.sum()), 1)
    large = sizes * min(overall, 1 - overall) >= LEAST_EXPECTED
    if large.sum() < 2:
        return None
    n, x = sizes[large], losses[large]
    share = x.sum() / n.sum()
    residual = (x - n * share) / np.sqrt(n * share * (1 - share))
    p_value = float(chi2.sf((residual**2).sum(), n.size - 1))
    most = int(np.flatnonzero(large)[np.argmax(np.abs(residual))])
    rest = (losses.sum() - losses[most]) / max(int(sizes.sum() - sizes[most]), 1)
    return Imbalance(
        key, ((key, names[most]),), float(losses[most] / sizes[most]), float(rest), p_value
    )


def _of_losses(lost: Mask, intended: Mask, is_loss: Mask) -> Imbalance:
    table = [
        [int((lost & group).sum()), int((intended & ~lost & group).sum())]
        for group in (is_loss, ~is_loss)
    ]
    shares = [row[0] / sum(row) if sum(row) else 0.0 for row in table]
    return Imbalance(
        "incumbent_loss", (), shares[0], shares[1], float(fisher_exact(np.array(table)).pvalue)
    )
