"""Policies to begin with. Each is saved as a row when it is first used, and changed by saving the next version."""

from __future__ import annotations

from typing import Any

CAREFUL, QUICK, SHADOW_ONLY = "careful", "quick", "shadow-only"

_FAILURES = {
    "kind": "flags",
    "flags": [],
    "tolerance": 0.01,
    "margin": 0.05,
    "overall_margin": 0.02,
}
_FLAGS = {"kind": "flags", "modes": ["shadow"]}
_COST = {
    "kind": "cost", "field": "engine_s_per_1k", "modes": ["canary"], "segments": [], "critical": False,
    "tolerance": 0.05, "margin": 0.1,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    CAREFUL: {
        "block_s": 60,
        "metrics": {
            "failure_rate": _FAILURES,
            "flag_rate": _FLAGS,
            "p99_latency": {"kind": "latency"},
            "cost": _COST,
        },
        "steps": [
            {"type": "score", "share": 0.1, "floor": 50, "until": "floor"},
            {"type": "shadow", "share": 0.2, "self_share": 0.01, "floor": 300},
            {"type": "canary", "bp": 100, "floor": 100, "until": "floor", "for_s": 1800},
            {"type": "approval"},
            {"type": "canary", "bp": 1000, "floor": 500, "until": "floor", "for_s": 3600},
            {"type": "canary", "bp": 2500, "floor": 1000, "for_s": 3600},
            {"type": "bake", "for_s": 86_400},
        ],
        "in_flight": "retry_if_no_token",
        "standby_s": 86_400,
    },
    QUICK: {
        "block_s": 30,
        "metrics": {
            "failure_rate": _FAILURES,
            "flag_rate": _FLAGS,
            "p99_latency": {"kind": "latency"},
        },
        "steps": [
            {"type": "shadow", "share": 0.5, "floor": 100, "deadline_s": 86_400},
            {"type": "canary", "bp": 2500, "floor": 300, "for_s": 600, "deadline_s": 86_400},
            {"type": "bake", "for_s": 900},
        ],
        "standby_s": 3_600,
        "deadline_s": 172_800,
    },
    SHADOW_ONLY: {
        "block_s": 60,
        "metrics": {"failure_rate": {**_FAILURES, "modes": ["shadow"]}, "flag_rate": _FLAGS},
        "steps": [
            {"type": "score", "share": 0.1, "floor": 50, "until": "floor"},
            {"type": "shadow", "share": 0.2, "self_share": 0.01, "floor": 300},
        ],
    },
}
