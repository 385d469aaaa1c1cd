"""Observations: which answers of the candidate may be compared with which of the incumbent.

Rules look at time, arm, prompt and user, never at an outcome, and treat both arms alike: with two equal versions the mean
difference of what they keep is zero, whatever share of traffic the candidate had and whenever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

ABSENT = -1
# Controls per candidate request. Each divides 20, so a mean of zeros and ones lies on the grid of differences.
NUM_CONTROLS = np.array([0, 1, 2, 2, 4, 5])


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of both arms, ordered by time and then by identity. Codes are ABSENT where unknown; all [num_requests].

    ``draw`` is a keyed hash of the identity: controls are drawn in its order, so that a draw is random, and the same
    again whenever and wherever it is repeated.
    """

    at: Floats
    is_candidate: Mask
    is_shadow: Mask
    pair: Integers
    prompt: Integers
    user: Integers
    scorer: Integers
    draw: NDArray[np.uint64]
    block_s: float

    @property
    def block(self) -> Integers:
        """The time block of each request."""
        return np.floor(self.at / self.block_s).astype(np.int64)

    @property
    def closed_at(self) -> Floats:
        """When the time block of each request closes."""
        return np.asarray((self.block + 1) * self.block_s, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Matches:
    """Candidate requests, each with its own controls; a control is used once.

    ``controls`` holds those of the first candidate request, then those of the second, and so on. ``known_at`` is when
    a comparison may be counted: a block once it has closed, a pair once it and all pairs dispatched before it have
    ended. A candidate that fails slowly would else look good until its failures arrive.
    """

    candidates: Integers  # [num_matches]
    controls: Integers  # [sum of num_controls]
    num_controls: Integers  # [num_matches]
    known_at: Floats  # [num_matches]

    @property
    def first_controls(self) -> Integers:
        """One control of each match. [num_matches]"""
        return self.controls[self._starts]

    @property
    def _starts(self) -> Integers:
        return np.cumsum(self.num_controls) - self.num_controls

    def select(self, mask: Mask) -> Matches:
        """The matches where ``mask`` holds. [num_matches]"""
        return Matches(
            self.candidates[mask],
            self.controls[np.repeat(mask, self.num_controls)],
            self.num_controls[mask],
            self.known_at[mask],
        )

    def joined(self, other: Matches) -> Matches:
        """Both, in the order in which they become known."""
        both = Matches(
            np.concatenate([self.candidates, other.candidates]),
            np.concatenate([self.controls, other.controls]),
            np.concatenate([self.num_controls, other.num_controls]),
            np.concatenate([self.known_at, other.known_at]),
        )
        order = np.lexsort((both.candidates, both.known_at))
        starts = both._starts[order]
        sizes = both.num_controls[order]
        return Matches(
            both.candidates[order],
            both.controls[_ranges(starts, sizes)],
            sizes,
            both.known_at[order],
        )

    def differences(self, values: Floats) -> Floats:
        """Candidate minus the mean of its controls; not a number where one of them was not measured. [num_matches]"""
        return self._average(values[self._candidate_per_control()] - values[self.controls])

    def ratios(self, values: Floats) -> Floats:
        """Mean of (candidate - control) / (candidate + control), for positive quantities such as cost. [num_matches]

        Bounded by one, and swapping the arms changes its sign alone: it is zero in the mean for equal versions, however
        skewed the quantity. A candidate that costs a share r more has r / (2 + r).
        """
        candidate, control = values[self._candidate_per_control()], values[self.controls]
        total = candidate + control
        is_free = total == 0
        return self._average(
            np.where(is_free, 0.0, (candidate - control) / np.where(is_free, 1.0, total))
        )

    def _candidate_per_control(self) -> Integers:
        return np.repeat(self.candidates, self.num_controls)

    def _average(self, values: Floats) -> Floats:
        if values.size == 0:
            return np.zeros(0)
        return np.asarray(np.add.reduceat(values, self._starts) / self.num_controls)


@dataclass(frozen=True, slots=True)
class Comparable:
    """What of the traffic may be compared.

    Attributes:
        pairs: comparisons of two answers to one prompt, from shadow and, where both arms met it, from canary.
        pool: canary requests of either arm that wait for controls of their own segment and block. [num_requests]
        intended: incumbent requests of which a shadow copy was meant to be judged. [num_requests]
        dropped: those of them of which no copy was dispatched: unobserved. [num_requests]
        answered: candidate requests that count for measures which need no control. [num_requests]
        num_repeats, num_unfair, num_mixed: requests left out as repeats of a prompt or user, as repeats that one arm
            alone has met, and as pairs that two classifier versions have scored.
    """

    pairs: Matches
    pool: Mask
    intended: Mask
    dropped: Mask
    answered: Mask
    num_repeats: int
    num_unfair: int
    num_mixed: int


def find_comparable(traffic: Traffic, *, users_once_per_block: bool = False) -> Comparable:
    """Apply the rules to ``traffic``.

    Of shadow pairs one counts per user and block. In a canary a user counts once: arms are sticky, so someone whom
    every version fails would speak against one and the same arm again and again; ``users_once_per_block`` accepts
    that where users are many and alike. A prompt counts once in an experiment, in the block where either arm first met
    it. In a canary a prompt that both arms met in that block is compared with itself, a prompt met once joins the
    pool, and one met several times by one arm alone is left out of both: of popular prompts an arm with little traffic
    meets fewer, so to keep them would compare one mixture of prompts with another.
    """
    shadow, dropped, num_mixed = _pair_up(traffic)
    user_block = _user_blocks(traffic)
    is_unique = ~traffic.is_shadow
    user = user_block if users_once_per_block else traffic.user
    is_unique[is_unique] = _is_first(user[is_unique])
    canary_block = _first_block(traffic, is_unique)
    kept = shadow.select(_is_first(user_block[shadow.controls]))
    kept = kept.select(_is_first(traffic.prompt[kept.controls]))
    # A prompt that a closed canary block has counted is not counted again, and the other way round.
    first_met = canary_block[kept.controls]
    kept = kept.select((first_met == ABSENT) | (kept.known_at < (first_met + 1) * traffic.block_s))
    is_new = (traffic.block == canary_block) & ~np.isin(
        traffic.prompt, traffic.prompt[kept.controls]
    )
    is_fresh = is_unique & (is_new | (traffic.prompt == ABSENT))
    pool, met_by_both, num_unfair = _split_by_prompt(traffic, is_fresh)
    intended = dropped.copy()
    intended[shadow.controls] = True
    num_canary_repeats = int((~traffic.is_shadow & ~is_fresh).sum())
    return Comparable(
        pairs=kept.joined(met_by_both),
        pool=pool,
        intended=intended,
        dropped=dropped,
        answered=is_unique & traffic.is_candidate,
        num_repeats=shadow.candidates.size - kept.candidates.size + num_canary_repeats,
        num_unfair=num_unfair,
        num_mixed=num_mixed,
    )


def match_blocks(traffic: Traffic, pool: Mask, stratum: Integers | None = None) -> Matches:
    """Give each candidate request of ``pool`` controls of its own block (and stratum); in the order of blocks.

    A block gives each of its candidate requests as many controls as it has for all of them, five at most. Where it has
    fewer than one each, some candidate requests, drawn, stay unmatched.
    """
    order = np.lexsort((traffic.draw, traffic.scorer, traffic.block))
    order = order[pool[order]]
    strata = np.zeros_like(traffic.block) if stratum is None else stratum
    labels = np.stack([traffic.block, strata, traffic.scorer])[:, order]
    cells, cell = np.unique(labels, axis=1, return_inverse=True)
    cell = cell.reshape(-1)
    is_candidate = traffic.is_candidate[order]
    arrange = np.argsort(cell, kind="stable")
    order, cell, is_candidate = order[arrange], cell[arrange], is_candidate[arrange]

    candidates, candidate_cell = order[is_candidate], cell[is_candidate]
    controls, control_cell = order[~is_candidate], cell[~is_candidate]
    num_candidates = np.bincount(candidate_cell, minlength=cells.shape[1])
    available = np.bincount(control_cell, minlength=cells.shape[1])
    first_candidate = np.cumsum(num_candidates) - num_candidates
    first_control = np.cumsum(available) - available

    ratio = available // np.maximum(num_candidates, 1)
    # Fewer controls than candidate requests: one each as far as they go.
    per_candidate = np.where(available > 0, NUM_CONTROLS[np.clip(ratio, 1, 5)], 0)
    rank = np.arange(candidates.size) - first_candidate[candidate_cell]
    size = per_candidate[candidate_cell]
    is_matched = (size > 0) & ((rank + 1) * size <= available[candidate_cell])
    starts = (first_control[candidate_cell] + rank * size)[is_matched]
    size = size[is_matched]
    matched = candidates[is_matched]
    return Matches(
        matched,
        controls[_ranges(starts, size)],
        size,
        traffic.closed_at[matched],
    )


def _pair_up(traffic: Traffic) -> tuple[Matches, Mask, int]:
    """Shadow pairs with both answers, the incumbent requests whose copy was dropped, pairs of two classifiers."""
    rows = np.flatnonzero(traffic.is_shadow & (traffic.pair != ABSENT))
    rows = rows[_is_first(2 * traffic.pair[rows] + traffic.is_candidate[rows])]
    of_incumbent, of_candidate = (
        rows[traffic.is_candidate[rows] == is_candidate] for is_candidate in (False, True)
    )
    _, incumbent, candidate = np.intersect1d(
        traffic.pair[of_incumbent], traffic.pair[of_candidate], return_indices=True
    )
    controls, candidates = of_incumbent[incumbent], of_candidate[candidate]
    dropped = np.zeros(traffic.at.size, dtype=np.bool_)
    dropped[of_incumbent] = True
    dropped[controls] = False
    order = np.argsort(controls, kind="stable")  # of dispatch, because requests are ordered by time
    candidates, controls = candidates[order], controls[order]
    answered_at = np.maximum(traffic.at[controls], traffic.at[candidates])
    pairs = _one_each(candidates, controls, np.maximum.accumulate(answered_at))
    is_same = traffic.scorer[pairs.candidates] == traffic.scorer[pairs.controls]
    return pairs.select(is_same), dropped, int((~is_same).sum())


def _split_by_prompt(traffic: Traffic, is_fresh: Mask) -> tuple[Mask, Matches, int]:
    """Of requests in the first block of their prompt: those met once, those met by both arms as pairs, the others."""
    rows = np.flatnonzero(is_fresh & (traffic.prompt != ABSENT))
    prompts, which, num_met = np.unique(
        traffic.prompt[rows], return_inverse=True, return_counts=True
    )
    is_candidate = traffic.is_candidate[rows]
    num_candidate = np.bincount(which[is_candidate], minlength=prompts.size)
    by_both = (num_candidate > 0) & (num_candidate < num_met)
    by_one = (num_met > 1) & ~by_both

    pool = is_fresh.copy()
    pool[rows[num_met[which] > 1]] = False
    firsts = []
    for arm in (True, False):
        of_arm = np.flatnonzero((is_candidate == arm) & by_both[which])
        firsts.append(rows[of_arm[_is_first(which[of_arm])]])
    candidates, controls = (first[np.argsort(traffic.prompt[first])] for first in firsts)
    known_at = traffic.closed_at[candidates]
    pairs = _one_each(candidates, controls, known_at)
    pairs = pairs.select(traffic.scorer[candidates] == traffic.scorer[controls])
    return pool, pairs, int(num_met[by_one].sum())


def _user_blocks(traffic: Traffic) -> Integers:
    """One number per user and block, ABSENT where the user is unknown."""
    block = traffic.block - traffic.block.min(initial=0)
    return np.where(
        traffic.user == ABSENT, ABSENT, traffic.user * (block.max(initial=0) + 1) + block
    )


def _first_block(traffic: Traffic, among: Mask) -> Integers:
    """The block in which the prompt of each request was first met ``among`` these; ABSENT if never."""
    known = among & (traffic.prompt != ABSENT)
    first = np.full(int(traffic.prompt.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, traffic.prompt[known], traffic.block[known])
    first[first == np.iinfo(np.int64).max] = ABSENT
    return np.where(traffic.prompt == ABSENT, ABSENT, first[traffic.prompt])


def _is_first(keys: Integers) -> Mask:
    """True where a key occurs for the first time; always for ABSENT."""
    is_first = keys == ABSENT
    _, index = np.unique(keys, return_index=True)
    is_first[index] = True
    return np.asarray(is_first, dtype=np.bool_)


def _one_each(candidates: Integers, controls: Integers, known_at: Floats) -> Matches:
    return Matches(candidates, controls, np.ones(candidates.size, dtype=np.int64), known_at)


def _ranges(starts: Integers, sizes: Integers) -> Integers:
    """starts[0], starts[0]+1, ... for sizes[0] numbers, then from starts[1], and so on."""
    ends = np.cumsum(sizes)
    within = np.arange(int(sizes.sum())) - np.repeat(ends - sizes, sizes)
    return np.asarray(np.repeat(starts, sizes) + within, dtype=np.int64)
