"""Slices nobody declared: a shallow tree over past differences proposes one, and only later data may judge it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drift.segments import Columns, Segment

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

DEPTH = 3
# A proposal costs a share of the error budget, so the past has to speak for it at least this much.
LEAST_Z = 1.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A slice, how many past observations it had, and how far their mean lay above the tolerance in standard errors."""

    segment: Segment
    n: int
    z: float


def propose(
    columns: Columns,
    differences: Floats,
    *,
    tolerance: float,
    minimum: int,
    known: frozenset[Segment],
) -> Proposal | None:
    """The leaf of a regression tree where the candidate looks worst; none where no new one looks bad.

    A slice keeps the conditions key = value of its leaf and drops those that say what a leaf is not: it can be named,
    and since it is judged on data that the tree has not seen, any choice is valid.

    Source: the tree is that of Breiman et al. (1984), Classification and Regression Trees, section 8.3, without pruning.
    """
    conditions = [
        (key, name, column.codes == code)
        for key, column in sorted(columns.items())
        for code, name in enumerate(column.names)
    ]
    leaves = _grow(conditions, differences, np.ones(differences.size, np.bool_), (), minimum, DEPTH)
    proposals = (
        _score(leaf, conditions, differences, tolerance) for leaf in sorted(set(leaves)) if leaf
    )
    fresh = [p for p in proposals if p.segment not in known and p.n >= minimum and p.z >= LEAST_Z]
    return max(fresh, key=lambda proposal: (proposal.z, proposal.segment), default=None)


def _grow(
    conditions: list[tuple[str, str, Mask]],
    differences: Floats,
    rows: Mask,
    path: Segment,
    minimum: int,
    depth: int,
) -> list[Segment]:
    """The positive conditions of each leaf below ``rows``, and of each node on the way."""
    split = _best_split(conditions, differences, rows, minimum) if depth else None
    if split is None:
        return [path]
    key, name, holds = split
    inside = tuple(sorted({*path, (key, name)}))
    return [
        path,
        *_grow(conditions, differences, rows & holds, inside, minimum, depth - 1),
        *_grow(conditions, differences, rows & ~holds, path, minimum, depth - 1),
    ]


def _best_split(
    conditions: list[tuple[str, str, Mask]], differences: Floats, rows: Mask, minimum: int
) -> tuple[str, str, Mask] | None:
    """The condition that takes most from the sum of squares, with ``minimum`` rows on either side."""
    if not conditions:
        return None
    here = differences[rows]
    inside = np.stack([holds[rows] for _, _, holds in conditions])  # [num_conditions, num_rows]
    n_in = inside.sum(axis=1)
    n_out = here.size - n_in
    sum_in = inside @ here
    sum_out = here.sum() - sum_in
    is_allowed = (n_in >= minimum) & (n_out >= minimum)
    if not is_allowed.any():
        return None
    between = sum_in**2 / np.maximum(n_in, 1) + sum_out**2 / np.maximum(n_out, 1)
    gain = np.where(is_allowed, between - here.sum() ** 2 / here.size, -np.inf)
    best = int(np.argmax(gain))
    return conditions[best] if gain[best] > 0 else None


def _score(
    segment: Segment,
    conditions: list[tuple[str, str, Mask]],
    differences: Floats,
    tolerance: float,
) -> Proposal:
    holds = {(key, name): mask for key, name, mask in conditions}
    inside = np.logical_and.reduce([holds[condition] for condition in segment])
    sample = differences[inside]
    if sample.size < 2:
        return Proposal(segment, int(sample.size), -np.inf)
    # One imagined opposite observation keeps the error of a constant sample above zero.
    spread = float(np.sqrt((sample.var() * sample.size + 1) / (sample.size + 1)))
    z = (float(sample.mean()) - tolerance) * np.sqrt(sample.size) / spread
    return Proposal(segment, int(sample.size), float(z))
