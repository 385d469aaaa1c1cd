"""Drafts of traffic that fool simpler comparisons, and of candidates that ought to be caught."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from drift.eprocess import Floats
from drift.segments import Segment
from tests.simulations import Draft, canary, rush, shadow


def flat(rate: float) -> Callable[[Floats], Floats]:
    return lambda when: np.full_like(when, rate)


def ramp(when: Floats) -> Floats:
    """1, 10, then 30 % for the candidate while the rush lasts, in the middle of blocks; a pause at 5 % after it."""
    return np.select([when < 0.33, when < 0.37, when < 0.5], [0.01, 0.10, 0.30], 0.05)


def rush_loss(when: Floats) -> Floats:
    return 0.02 + 0.13 * rush(when)


# Equal versions under circumstances that fool simpler comparisons.
CASES: dict[str, Callable[[np.random.Generator], Draft]] = {
    "canary ramp during a rush that also slows both": lambda rng: canary(
        rng, 6_000, share=ramp, loss=rush_loss, slow=lambda when: 1 + rush(when)
    ),
    "canary, half of traffic repeats popular prompts": lambda rng: canary(
        rng, 6_000, share=flat(0.3), loss=flat(0.03), popular=300
    ),
    "canary, sticky users whom every version fails": lambda rng: canary(
        rng, 6_000, share=flat(0.3), loss=flat(0.03), users=500
    ),
    "shadow, half of traffic repeats popular prompts": lambda rng: shadow(
        rng, 4_000, incumbent=flat(0.03), popular=50
    ),
    "shadow, copies dropped in the rush": lambda rng: shadow(
        rng, 4_000, incumbent=rush_loss, dropped=lambda when: 0.7 * rush(when)
    ),
    "shadow, a slow candidate, slowest where it fails": lambda rng: shadow(
        rng, 4_000, incumbent=rush_loss, delay_s=900.0
    ),
}


def slow_failures(rng: np.random.Generator) -> Draft:
    """Worse by exactly the overall margin of 2 points, and its failures take up to three quarters of an hour longer."""
    return shadow(
        rng, 4_000, incumbent=flat(0.02), harm=lambda labels: np.full(1, 0.02), delay_s=1_800.0
    )


HIDDEN: Segment = (("lang", "lang00"), ("topic", "topic00"))
NUM_LANGS = 5


def hidden_slice(rng: np.random.Generator, num_pairs: int = 20_000, harm: float = 0.15) -> Draft:
    """15 points worse for one topic in one language, which is 2.5 % of traffic."""
    return shadow(
        rng,
        num_pairs,
        incumbent=flat(0.05),
        harm=lambda labels: harm * ((labels["topic"] == 0) & (labels["lang"] == 0)),
        num_langs=NUM_LANGS,
    )


def slow_tail(rng: np.random.Generator, num_requests: int = 12_000) -> Draft:
    """A canary with a better mean, of which 3 % of requests take four times as long."""
    draft = canary(rng, num_requests, share=flat(0.5), loss=flat(0.03))
    size = draft.at.size
    factor = np.where(rng.random(size) < 0.03, 4.0, 1.0) * 0.9
    latency = np.where(draft.is_candidate, draft.latency_ms * factor, draft.latency_ms)
    return Draft(
        draft.at, draft.is_candidate, draft.is_shadow, draft.pair, draft.prompt, draft.user, draft.loss,
        latency, draft.labels,
    )  # fmt: skip


def few_requests(rng: np.random.Generator) -> Draft:
    """The same, about 120 requests of either arm."""
    return slow_tail(rng, 240)
