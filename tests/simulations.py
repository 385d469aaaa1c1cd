"""Simulated traffic for the error rates of verdicts, as arrays; a quick set in tests, the full one in `make bench-verdicts`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.rollouts.backtest import Replayed, replay
from controlplane.rollouts.observations import Recording, observe
from controlplane.rollouts.policy import Policy, parse_policy
from drift.eprocess import Floats, Side, Support, log_e_values
from drift.matching import ABSENT, Traffic
from drift.segments import Column

Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Paired losses differ by -1, 0 or 1: the grid of differences without what they never use.
PAIRED = Support(-1.0, 1.0, 2)
BETTER_SAME_WORSE = (0, 2, 4)


# ------------------------------------------------------------------------------------------- streams of paired losses
@dataclass(frozen=True, slots=True)
class Pairs:
    """Paired losses of many runs at once: how often the candidate alone failed, and the incumbent alone.

    All counts are cumulative over looks. [num_looks, num_runs, num_segments]
    """

    num: Integers
    worse: Integers
    better: Integers


def draw_pairs(
    rng: np.random.Generator,
    *,
    num_runs: int,
    shares: Floats,
    loss: float,
    harm: Floats,
    num_looks: int,
    pairs_per_look: int,
) -> Pairs:
    """Pairs that fail independently: the incumbent at ``loss``, the candidate at ``loss`` + ``harm`` of its segment."""
    worse_chance = (loss + harm) * (1 - loss)
    better_chance = loss * (1 - loss - harm)
    num = rng.multinomial(pairs_per_look, shares, size=(num_looks, num_runs))
    worse = rng.binomial(num, worse_chance)
    better = rng.binomial(num - worse, better_chance / (1 - worse_chance))
    return Pairs(*(np.cumsum(counts, axis=0) for counts in (num, worse, better)))


def log_e_of_pairs(pairs: Pairs, look: int, null_mean: float, side: Side) -> Floats:
    """What the gates compute on these counts. [num_runs, num_segments]"""
    num, worse, better = (counts[look] for counts in (pairs.num, pairs.worse, pairs.better))
    counts = np.zeros((*num.shape, PAIRED.num_cells), dtype=np.int64)
    for cell, part in zip(BETTER_SAME_WORSE, (better, num - worse - better, worse), strict=True):
        counts[..., cell] = part
    return log_e_values(counts, PAIRED, null_mean, side)


def first_look(
    alarms: Callable[[int], NDArray[Any] | np.bool_], num_looks: int, num_runs: int
) -> Integers:
    """The look (from 1) at which each run first raised an alarm; 0 for never. [num_runs]"""
    first = np.zeros(num_runs, dtype=np.int64)
    for look in range(num_looks):
        first = np.where((first == 0) & alarms(look), look + 1, first)
    return first


def rollback_looks(pairs: Pairs, tolerance: float, alpha: float = 0.05) -> Integers:
    """When the average over segments reaches 1 / alpha."""
    num_looks, num_runs, _ = pairs.num.shape

    def alarms(look: int) -> Mask:
        evidence = log_e_of_pairs(pairs, look, tolerance, Side.ABOVE)
        largest = evidence.max(axis=1, keepdims=True)
        average = largest[:, 0] + np.log(np.exp(evidence - largest).mean(axis=1))
        return np.asarray(average >= -math.log(alpha))

    return first_look(alarms, num_looks, num_runs)


def promotion_looks(pairs: Pairs, margin: float, alpha: float = 0.05) -> Integers:
    """When every segment has once reached 1 / alpha."""
    num_looks, num_runs, num_segments = pairs.num.shape
    shown = np.zeros((num_runs, num_segments), dtype=np.bool_)

    def alarms(look: int) -> Mask:
        nonlocal shown
        evidence = log_e_of_pairs(pairs, look, margin, Side.BELOW)
        shown = shown | (evidence >= -math.log(alpha))
        return np.asarray(shown.all(axis=1))

    return first_look(alarms, num_looks, num_runs)


def z_looks(pairs: Pairs, threshold: float, null_mean: float = 0.0, least: int = 30) -> Integers:
    """When a repeated one-sided z-test alarms on any segment."""
    num_looks, num_runs, _ = pairs.num.shape
    return first_look(
        lambda look: np.asarray((_z(pairs, look, null_mean, least) > threshold).any(axis=1)),
        num_looks,
        num_runs,
    )


def z_promotion_looks(pairs: Pairs, margin: float, least: int = 30) -> Integers:
    """When the upper bound of a repeated one-sided 95 % interval lies below the margin on every segment."""
    num_looks, num_runs, _ = pairs.num.shape
    return first_look(
        lambda look: (_z(pairs, look, margin, least) < -1.645).all(axis=1), num_looks, num_runs
    )


def msprt_looks(pairs: Pairs, threshold: float, tau: float = 0.1, least: int = 30) -> Integers:
    """When the mixture SPRT of Johari et al. (2022) with plug-in variance alarms on any segment, for harm alone."""
    num_looks, num_runs, _ = pairs.num.shape

    def alarms(look: int) -> Mask:
        n, mean, variance = _moments(pairs, look)
        shrink = variance + n * tau**2
        log_ratio = 0.5 * np.log(variance / shrink)
        log_ratio += n**2 * tau**2 * mean**2 / (2 * variance * shrink)
        return np.asarray(
            ((log_ratio >= math.log(threshold)) & (mean > 0) & (n >= least)).any(axis=1)
        )

    return first_look(alarms, num_looks, num_runs)


def _moments(pairs: Pairs, look: int) -> tuple[Floats, Floats, Floats]:
    n = np.maximum(pairs.num[look], 1).astype(np.float64)
    worse, better = pairs.worse[look], pairs.better[look]
    mean = (worse - better) / n
    variance = np.maximum((worse + better) / n - mean**2, 1 / n)
    return n, mean, variance


def _z(pairs: Pairs, look: int, null_mean: float, least: int) -> Floats:
    n, mean, variance = _moments(pairs, look)
    return np.where(n >= least, (mean - null_mean) / np.sqrt(variance / n), 0.0)


# ------------------------------------------------------------------------------- requests, through matching and gates
@dataclass(frozen=True, slots=True)
class Draft:
    """Requests of both arms before they are sorted; [num_requests] each."""

    at: Floats
    is_candidate: Mask
    is_shadow: Mask
    pair: Integers
    prompt: Integers
    user: Integers
    loss: Floats
    latency_ms: Floats
    labels: dict[str, Integers] = field(default_factory=dict)


def record(draft: Draft, rng: np.random.Generator, policy: Policy) -> Recording:
    """The recording of a draft, in order of time."""
    order = np.argsort(draft.at, kind="stable")
    size = order.size
    columns = {
        key: Column(
            codes[order].astype(np.int32),
            tuple(f"{key}{n:02}" for n in range(int(codes.max()) + 1)),
        )
        for key, codes in draft.labels.items()
    }
    return Recording(
        traffic=Traffic(
            at=draft.at[order],
            is_candidate=draft.is_candidate[order],
            is_shadow=draft.is_shadow[order],
            pair=draft.pair[order],
            prompt=draft.prompt[order],
            user=draft.user[order],
            scorer=np.full(size, ABSENT),
            draw=rng.integers(0, 2**63, size=size).astype(np.uint64),
            block_s=policy.block_s,
        ),
        columns=columns,
        losses={"flag_rate": draft.loss[order]},
        latency_ms=draft.latency_ms[order],
        failed=np.zeros(size, dtype=np.bool_),
    )


def judge_draft(draft: Draft, rng: np.random.Generator, policy: Policy) -> Replayed:
    """What a backtest says of a draft."""
    return replay(observe(record(draft, rng, policy), policy))


HOURS = 6.0


def rush(when: Floats) -> Floats:
    """0 outside of the rush, 1 in it; the rush is the third sixth of the time."""
    return ((when >= 2 / 6) & (when < 3 / 6)).astype(np.float64)


def arrivals(rng: np.random.Generator, num: int) -> Floats:
    """Times in [0, 1): four times as many in the rush."""
    when = rng.random(2 * num + 200)
    return np.sort(when[rng.random(when.size) < 0.25 + 0.75 * rush(when)][:num])


def draw_topics(rng: np.random.Generator, num: int, num_topics: int = 8) -> Integers:
    return np.asarray(rng.integers(0, num_topics, size=num))


def canary(
    rng: np.random.Generator,
    num: int,
    *,
    share: Callable[[Floats], Floats],
    loss: Callable[[Floats], Floats],
    slow: Callable[[Floats], Floats] = lambda when: np.ones_like(when),
    candidate_slow: float = 1.0,
    users: int = 0,
    popular: int = 0,
) -> Draft:
    """Canary requests of equal versions; ``popular`` prompts, if any, make half of the traffic.

    A popular prompt always gets the same answer. With ``users``, a user stays on one arm and either fails often or never.
    """
    when = arrivals(rng, num)
    num = when.size
    user = rng.zipf(1.3, size=num) % users if users else np.full(num, ABSENT)
    luck = rng.random(users) if users else rng.random(num)
    is_candidate = (luck[user] if users else luck) < share(when)
    losses = (rng.random(num) < loss(when)).astype(np.float64)
    if users:
        losses = (rng.random(num) < np.where(rng.random(users) < 0.1, 0.9, 0.02)[user]).astype(
            float
        )
    prompt = np.arange(num) + popular
    if popular:
        is_popular = rng.random(num) < 0.5
        which = rng.zipf(1.2, size=num) % popular
        prompt = np.where(is_popular, which, prompt)
        losses = np.where(is_popular, (rng.random(popular) < 0.3)[which], losses)
    latency = rng.lognormal(6, 0.3, size=num) * slow(when)
    return Draft(
        at=when * HOURS * 3600,
        is_candidate=is_candidate,
        is_shadow=np.zeros(num, dtype=np.bool_),
        pair=np.full(num, ABSENT),
        prompt=prompt,
        user=user,
        loss=losses,
        latency_ms=np.where(is_candidate, latency * candidate_slow, latency),
        labels={"topic": draw_topics(rng, num)},
    )


def shadow(
    rng: np.random.Generator,
    num: int,
    *,
    incumbent: Callable[[Floats], Floats],
    harm: Callable[[dict[str, Integers]], Floats] = lambda labels: np.zeros(1),
    dropped: Callable[[Floats], Floats] = lambda when: np.zeros_like(when),
    popular: int = 0,
    delay_s: float = 0.0,
    num_langs: int = 0,
) -> Draft:
    """Shadow pairs; with ``delay_s`` the candidate answers later, most so where it fails."""
    when = arrivals(rng, num)
    num = when.size
    labels = {"topic": draw_topics(rng, num)}
    if num_langs:
        labels["lang"] = draw_topics(rng, num, num_langs)
    chance = incumbent(when)
    losses = [
        (rng.random(num) < chance).astype(float),
        (rng.random(num) < chance + harm(labels)).astype(float),
    ]
    prompt = np.arange(num) + popular
    if popular:
        is_popular = rng.random(num) < 0.5
        which = rng.zipf(1.2, size=num) % popular
        prompt = np.where(is_popular, which, prompt)
        for arm in (0, 1):
            losses[arm] = np.where(is_popular, (rng.random(popular) < 0.1)[which], losses[arm])
    kept = rng.random(num) >= dropped(when)
    at = when * HOURS * 3600
    late = at + delay_s * (0.5 + rng.random(num) + losses[1])
    pair = np.arange(num)
    return Draft(
        at=np.concatenate([at, late[kept]]),
        is_candidate=np.repeat([False, True], [num, int(kept.sum())]),
        is_shadow=np.ones(num + int(kept.sum()), dtype=np.bool_),
        pair=np.concatenate([pair, pair[kept]]),
        prompt=np.concatenate([prompt, prompt[kept]]),
        user=np.full(num + int(kept.sum()), ABSENT),
        loss=np.concatenate([losses[0], losses[1][kept]]),
        latency_ms=rng.lognormal(6, 0.4, size=num + int(kept.sum())),
        labels={key: np.concatenate([codes, codes[kept]]) for key, codes in labels.items()},
    )


def policy_of(**fields: object) -> Policy:
    """The default policy with some fields changed."""
    return parse_policy(fields)


def alarm_rate(looks: Integers) -> float:
    """The share of runs that ever raised an alarm."""
    return float((looks > 0).mean())
