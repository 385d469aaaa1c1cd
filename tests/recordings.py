"""Simulated recordings of traffic, in the format that `manage.py backtest` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TOPICS = ("billing", "refund", "search", "code", "travel")
LANGS = ("en", "hi", "ta", "de")
TENANTS = ("acme", "globex", None)
SHARES = {
    "topic": (0.4, 0.05, 0.25, 0.2, 0.1),
    "lang": (0.55, 0.25, 0.1, 0.1),
    "tenant": (0.5, 0.3, 0.2),
}

Labels = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class World:
    """How often each arm fails on a request with these labels at a time in [0, 1), and how it behaves else."""

    incumbent: Callable[[Labels, float], float] = lambda labels, when: 0.03
    candidate: Callable[[Labels, float], float] = lambda labels, when: 0.03
    slowdown: Callable[[np.random.Generator], float] = lambda rng: 1.0
    canary_share: Callable[[float], float] = lambda when: 0.5
    is_dropped: Callable[[Labels, float, float], bool] = lambda labels, when, chance: False
    hours: float = 12.0
    extra: dict[str, Any] = field(default_factory=dict)


def draw_labels(rng: np.random.Generator) -> dict[str, str | None]:
    return {
        "topic": TOPICS[rng.choice(len(TOPICS), p=SHARES["topic"])],
        "lang": LANGS[rng.choice(len(LANGS), p=SHARES["lang"])],
        "tenant": TENANTS[rng.choice(len(TENANTS), p=SHARES["tenant"])],
    }


def shadow_rows(world: World, num_pairs: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of one prompt; a dropped copy has no row of the candidate."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_pairs):
        labels, when = draw_labels(rng), number / num_pairs
        common = {
            "ts": 1.7e9 + 3600 * world.hours * when,
            "mode": "shadow",
            "pair_id": f"p{number}",
        }
        common |= {"prompt": f"question {number}", **labels, **world.extra}
        rows.append(common | _answer("incumbent", number, world.incumbent(labels, when), rng, 1.0))
        if not world.is_dropped(labels, when, float(rng.random())):
            rows.append(
                common
                | _answer(
                    "candidate", number, world.candidate(labels, when), rng, world.slowdown(rng)
                )
            )
    return rows


def canary_rows(world: World, num_requests: int, seed: int) -> list[dict[str, Any]]:
    """Requests that went to one arm each."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_requests):
        labels, when = draw_labels(rng), number / num_requests
        is_candidate = rng.random() < world.canary_share(when)
        chance = (world.candidate if is_candidate else world.incumbent)(labels, when)
        slowdown = world.slowdown(rng) if is_candidate else 1.0
        arm = "candidate" if is_candidate else "incumbent"
        common = {"ts": 1.7e9 + 3600 * world.hours * when, "mode": "canary", "pair_id": None}
        common |= {"prompt": f"question {number}", **labels, **world.extra}
        rows.append(common | _answer(arm, number, chance, rng, slowdown))
    return rows


def to_lines(rows: list[dict[str, Any]]) -> list[str]:
    return [json.dumps(row) for row in rows]


def _answer(
    arm: str, number: int, chance: float, rng: np.random.Generator, slowdown: float
) -> dict[str, Any]:
    return {
        "request_id": f"r{number}",
        "arm": arm,
        "response": "an answer",
        "flags": ["refusal"] if rng.random() < chance else [],
        "latency_ms": round(float(rng.lognormal(6.0, 0.35)) * slowdown, 3),
    }
