"""`make bench-verdicts`: how often verdicts are wrong, and how soon they come, with fixed seeds.

Every rate that a promise bounds by 5 % is printed beside that bound. A rate over n runs is known up to about
2 sqrt(rate (1 - rate) / n): one point at 5 % and 2,000 runs.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from controlplane.rollouts import backtest
from controlplane.rollouts.backtest import Replayed
from controlplane.rollouts.gates import Decision
from controlplane.rollouts.policy import Policy, default_policy
from drift.eprocess import RATE, Floats, Side, log_e_values
from drift.segments import Segment
from drift.verdict import Verdict
from tests import recordings
from tests.scenarios import CASES, HIDDEN, few_requests, hidden_slice, slow_failures, slow_tail
from tests.simulations import (
    Draft,
    Pairs,
    alarm_rate,
    draw_pairs,
    first_look,
    judge_draft,
    msprt_looks,
    policy_of,
    promotion_looks,
    rollback_looks,
    z_looks,
    z_promotion_looks,
)

BOUND = 0.05
NUM_SEGMENTS = 20
NUM_LOOKS = 400
PAIRS_PER_LOOK = 50
# One-sided 5 % for one test, and for each of twenty.
Z, Z_BONFERRONI = 1.645, 2.807
# The first segment has 5 % of traffic; the others between 2 and 9 %.
SHARES: Floats = np.array([0.05, *(0.95 * np.linspace(1, 4, 19) / np.linspace(1, 4, 19).sum())])


# ------------------------------------------------------------------------------------------------ streams of pairs
def equal_pairs(num_runs: int, seed: int, harm: float = 0.0) -> Pairs:
    """Twenty segments with the same difference everywhere."""
    return _pairs(num_runs, seed, np.full(NUM_SEGMENTS, harm))


def pairs_with_a_bad_segment(num_runs: int, seed: int, harm: float) -> Pairs:
    """One segment of 5 % of traffic is worse, the others are equal."""
    return _pairs(num_runs, seed, np.array([harm, *np.zeros(NUM_SEGMENTS - 1)]))


def one_segment_at_the_margin(num_runs: int, seed: int) -> Pairs:
    """All traffic in one segment, worse by exactly 5 points: the hardest case for a promotion."""
    return draw_pairs(
        np.random.default_rng(seed),
        num_runs=num_runs,
        shares=np.ones(1),
        loss=0.05,
        harm=np.array([0.05]),
        num_looks=NUM_LOOKS,
        pairs_per_look=PAIRS_PER_LOOK,
    )


def _pairs(num_runs: int, seed: int, harm: Floats) -> Pairs:
    return draw_pairs(
        np.random.default_rng(seed),
        num_runs=num_runs,
        shares=SHARES,
        loss=0.05,
        harm=harm,
        num_looks=NUM_LOOKS,
        pairs_per_look=PAIRS_PER_LOOK,
    )


METHODS: dict[str, Callable[[Pairs], np.ndarray]] = {
    "naive z, repeated": lambda pairs: z_looks(pairs, Z),
    "Bonferroni z, repeated": lambda pairs: z_looks(pairs, Z_BONFERRONI),
    "mSPRT, Bonferroni": lambda pairs: msprt_looks(pairs, NUM_SEGMENTS / BOUND),
    "e-process, tolerance 0": lambda pairs: rollback_looks(pairs, 0.0),
    "e-process, tolerance 0.02": lambda pairs: rollback_looks(pairs, 0.02),
}


def measure_error_rates(num_runs: int) -> Iterable[str]:
    """Show 1: any false rollback, and wrong promotion."""
    yield f"20 segments, {NUM_LOOKS} looks, {NUM_LOOKS * PAIRS_PER_LOOK:,} pairs, loss 5 %, {num_runs:,} runs"
    equal = equal_pairs(num_runs, seed=11)
    for name, method in METHODS.items():
        bound = BOUND if name.startswith("e-") else None
        yield _rate(f"A = B, any false alarm: {name}", alarm_rate(method(equal)), bound)
    worse = equal_pairs(num_runs, seed=12, harm=0.02)
    rate = alarm_rate(rollback_looks(worse, 0.02))
    yield _rate("worse by exactly the tolerance everywhere: rollback", rate, BOUND)
    margin = one_segment_at_the_margin(num_runs, seed=13)
    yield _rate(
        "worse by exactly the margin: promotion", alarm_rate(promotion_looks(margin, 0.05)), BOUND
    )
    naive = alarm_rate(z_promotion_looks(margin, 0.05))
    yield _rate("worse by exactly the margin: promotion by repeated z", naive, None)
    among = pairs_with_a_bad_segment(num_runs, seed=14, harm=0.05)
    rate = alarm_rate(promotion_looks(among, 0.05))
    yield _rate("one of 20 worse by exactly the margin: promotion", rate, BOUND)
    yield _rate(
        "A = B: promotion of all 20 segments", alarm_rate(promotion_looks(equal, 0.05)), None
    )


def measure_detection(num_runs: int) -> Iterable[str]:
    """Show 1: a segment of 5 % of traffic, 10 points worse."""
    yield f"a segment of 5 % of traffic is 10 points worse, {num_runs:,} runs: pairs of all traffic until the alarm"
    bad = pairs_with_a_bad_segment(num_runs, seed=21, harm=0.10)
    for name, method in METHODS.items():
        looks = method(bad)
        found = np.where(looks > 0, looks * PAIRS_PER_LOOK, np.inf)
        median, late = np.quantile(found, [0.5, 0.9], method="higher")
        yield f"  {name:<28} median {median:>7,.0f}   p90 {late:>7,.0f}   found {alarm_rate(looks):.3f}"


# --------------------------------------------------------------------------------- requests, through matching and gates
# Tolerance 0 puts equal versions on the edge of the null, where errors are most frequent.
STRICT = policy_of(
    metrics={
        "flag_rate": {"kind": "flags", "tolerance": 0.0},
        "p99_latency": {"kind": "latency"},
    }
)


def rollback_rate(
    case: Callable[[np.random.Generator], Draft], policy: Policy, num_runs: int, seed: int
) -> float:
    """How often a rollback is due."""
    decisions = [
        replayed.judgement.decision for replayed in judge_runs(case, policy, num_runs, seed)
    ]
    return decisions.count(Decision.ROLLBACK) / num_runs


def judge_runs(
    case: Callable[[np.random.Generator], Draft], policy: Policy, num_runs: int, seed: int
) -> Iterable[Replayed]:
    """The verdicts on ``num_runs`` drafts."""
    for run in range(num_runs):
        rng = np.random.default_rng([seed, run])
        yield judge_draft(case(rng), rng, policy)


def pooled_z_rate(case: Callable[[np.random.Generator], Draft], num_runs: int, seed: int) -> float:
    """How often one z-test at the end, all requests of either arm together, says that the candidate is worse."""
    return float(
        np.mean(
            [_pooled_z(case(np.random.default_rng([seed, run]))) > Z for run in range(num_runs)]
        )
    )


def _pooled_z(draft: Draft) -> float:
    candidate, incumbent = draft.loss[draft.is_candidate], draft.loss[~draft.is_candidate]
    variance = candidate.var() / candidate.size + incumbent.var() / incumbent.size
    return float((candidate.mean() - incumbent.mean()) / math.sqrt(variance))


def measure_cases(num_runs: int) -> Iterable[str]:
    """Show 1: equal versions that look unequal."""
    yield f"A = B through matching, segments, discovery and gates; tolerance 0; {num_runs:,} runs each: false rollback"
    for number, (name, case) in enumerate(CASES.items()):
        rate = rollback_rate(case, STRICT, num_runs, seed=31 + number)
        pooled = pooled_z_rate(case, num_runs, seed=31 + number)
        yield _rate(name, rate, BOUND) + f"   pooled z, one look: {pooled:.3f}"
    lenient = policy_of(
        metrics={"flag_rate": {"kind": "flags", "tolerance": 0.0}}, users_once_per_block=True
    )
    users = CASES["canary, sticky users whom every version fails"]
    rate = rollback_rate(users, lenient, num_runs // 2, seed=33)
    yield _rate("the same users counted once per block instead of once", rate, None)


AT_THE_MARGIN = policy_of(
    metrics={"flag_rate": {"kind": "flags"}}, segments={"keys": []}, discovery=None
)


def promotion_rate(
    case: Callable[[np.random.Generator], Draft], policy: Policy, num_runs: int, seed: int
) -> float:
    """How often a promotion is due."""
    decisions = [
        replayed.judgement.decision for replayed in judge_runs(case, policy, num_runs, seed)
    ]
    return decisions.count(Decision.PROMOTE) / num_runs


def measure_delay(num_runs: int) -> Iterable[str]:
    """Show 1: a slow candidate must not look good until its failures arrive."""
    yield f"worse by exactly the margin, failures arrive late, 4,000 pairs, {num_runs:,} runs"
    yield _rate("promotion", promotion_rate(slow_failures, AT_THE_MARGIN, num_runs, 38), BOUND)


# ------------------------------------------------------------------------------------------------ a hidden two-way slice
WITHOUT_DISCOVERY = policy_of(discovery=None)
CROSSED = policy_of(discovery=None, segments={"crossings": [["lang", "topic"]]})


def names(replayed: Replayed, segment: Segment) -> bool:
    """Whether ``segment`` was named as failed, or a part of it."""
    return any(
        result.verdict is Verdict.FAIL and set(segment) <= set(result.segment)
        for result in replayed.judgement.results
    )


def fails_a_discovered_slice(replayed: Replayed) -> bool:
    """Whether any slice that nobody declared was named as failed."""
    return any(
        result.verdict is Verdict.FAIL and result.number for result in replayed.judgement.results
    )


def measure_discovery(num_runs: int) -> Iterable[str]:
    """Show 2."""
    few = max(1, num_runs // 5)
    yield f"one topic in one language, 2.5 % of traffic, 15 points worse, 20,000 pairs, {few:,} runs: found"
    for name, policy in (
        ("declared singles", WITHOUT_DISCOVERY),
        ("declared crossing", CROSSED),
        ("discovery", default_policy()),
    ):
        verdicts = list(judge_runs(hidden_slice, policy, few, seed=41))
        found = float(np.mean([names(replayed, HIDDEN) for replayed in verdicts]))
        rolled_back = [r.judgement.decision is Decision.ROLLBACK for r in verdicts]
        yield f"  {name:<28} named {found:.3f}   rollback {float(np.mean(rolled_back)):.3f}"
    null = judge_runs(lambda rng: hidden_slice(rng, 8_000, 0.0), STRICT, num_runs, seed=42)
    rate = float(np.mean([fails_a_discovered_slice(replayed) for replayed in null]))
    yield _rate(
        f"A = B, tolerance 0, 8,000 pairs, {num_runs:,} runs: a discovered slice fails", rate, BOUND
    )


# ------------------------------------------------------------------------------------------------------------- the tail
def exceedance_looks(
    num_runs: int, seed: int, rate: float, side: Side, num_requests: int = 20_000
) -> np.ndarray:
    """When each run has shown that the rate of exceedances lies on ``side`` of 1 %."""
    rng = np.random.default_rng(seed)
    per_look = num_requests // NUM_LOOKS
    exceeded = np.cumsum(rng.binomial(per_look, rate, size=(NUM_LOOKS, num_runs)), axis=0)

    def alarms(look: int) -> np.ndarray:
        counts = np.zeros((num_runs, RATE.num_cells), dtype=np.int64)
        counts[:, 2] = exceeded[look]
        counts[:, 0] = (look + 1) * per_look - exceeded[look]
        return log_e_values(counts, RATE, 0.01, side) >= -math.log(BOUND)

    return first_look(alarms, NUM_LOOKS, num_runs)


def verdict_on_the_tail(replayed: Replayed) -> Verdict:
    return next(r.verdict for r in replayed.judgement.results if r.metric == "p99_latency")


def measure_tail(num_runs: int) -> Iterable[str]:
    """Show 3."""
    few = max(1, num_runs // 5)
    yield f"p99 against 1.2 x the incumbent's, {few:,} runs: verdicts"
    for name, case in (("12,000 requests", slow_tail), ("120 of either arm", few_requests)):
        replayed = judge_runs(case, default_policy(), few, seed=51)
        verdicts = [verdict_on_the_tail(one) for one in replayed]
        shares = ", ".join(f"{v} {verdicts.count(v) / few:.3f}" for v in Verdict if v in verdicts)
        yield f"  better mean, 3 % four times slower, {name}: {shares}"
    at_limit = alarm_rate(exceedance_looks(num_runs, 52, 0.01, Side.BELOW))
    yield _rate(
        f"exactly 1 % exceed, {NUM_LOOKS} looks, 20,000 requests, {num_runs:,} runs: PASS",
        at_limit,
        BOUND,
    )
    above = alarm_rate(exceedance_looks(num_runs, 53, 0.01, Side.ABOVE))
    yield _rate("exactly 1 % exceed: shown to be above", above, BOUND)
    for rate, side in ((0.003, Side.BELOW), (0.03, Side.ABOVE)):
        looks = exceedance_looks(num_runs, 54, rate, side, num_requests=8_000)
        median, late = np.quantile(
            np.where(looks > 0, looks * 20.0, np.inf), [0.5, 0.9], method="higher"
        )
        yield f"  {rate:.1%} exceed: shown after median {median:,.0f}, p90 {late:,.0f} requests"


def measure_speed(_num_runs: int) -> Iterable[str]:
    """A backtest of 60,000 rows."""
    rows = recordings.shadow_rows(recordings.World(hours=72.0), 15_000, seed=61)
    rows += recordings.canary_rows(recordings.World(hours=72.0), 30_000, seed=62)
    lines = recordings.to_lines(
        [row | {"request_id": f"{row['mode']}-{row['request_id']}"} for row in rows]
    )
    start = time.perf_counter()
    report = backtest.run(lines, default_policy())
    seconds = time.perf_counter() - start
    yield f"backtest of {report.num_rows:,} rows over 72 hours: {seconds:.1f} s, {report.to_json()['verdict']}"


def _rate(name: str, rate: float, bound: float | None) -> str:
    told = "" if bound is None else f"   <= {bound:.2f}  {'holds' if rate <= bound else 'BROKEN'}"
    return f"  {name:<62} {rate:.3f}{told}"


@dataclass(frozen=True, slots=True)
class Section:
    """What is measured, and over how many runs."""

    measure: Callable[[int], Iterable[str]]
    num_runs: int


SECTIONS = {
    "errors": Section(measure_error_rates, 2_000),
    "detection": Section(measure_detection, 1_000),
    "cases": Section(measure_cases, 1_000),
    "delay": Section(measure_delay, 1_000),
    "discovery": Section(measure_discovery, 1_000),
    "tail": Section(measure_tail, 2_000),
    "speed": Section(measure_speed, 1),
}


def main() -> int:
    """Print every section; exit 1 when a bound is broken."""
    parser = argparse.ArgumentParser(prog="make bench-verdicts ARGS=...", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default all")
    chosen = parser.parse_args().sections or list(SECTIONS)
    if unknown := sorted(set(chosen) - set(SECTIONS)):
        parser.error(f"unknown section {unknown[0]!r}; choose from {', '.join(SECTIONS)}.")
    is_broken = False
    for name in chosen:
        start = time.perf_counter()
        for line in SECTIONS[name].measure(SECTIONS[name].num_runs):
            is_broken |= "BROKEN" in line
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        sys.stdout.write(f"  [{name}: {time.perf_counter() - start:.0f} s]\n")
        sys.stdout.flush()
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
