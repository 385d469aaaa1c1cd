"""How one engine process takes part: its name, its Redis, its patience."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from inference.config import EngineConfig, InvalidConfig


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """Settings of one slot.

    A lease is renewed four times in ``lease_ms``. ``stall_s`` is longer than any step may take, ``load_s`` than any
    version takes to load; after that the process exits. ``yield_s`` is how long a live version may be without a slot
    before one that holds a candidate makes room: longer than a process that died takes to come back. ``engine`` is a
    callable ``(EngineConfig) -> SlotEngine``.
    """

    slot: str
    redis_url: str
    engine: str = "inference.engine.llm_engine:LLMEngine.load"
    lease_ms: int = 2_000
    drain_s: int = 20
    stall_s: int = 30
    load_s: int = 600
    yield_s: int = 15

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", self.slot):
            raise InvalidConfig(
                f"TATKAL_SLOT={self.slot!r} must be 1 to 64 letters, digits, hyphens or underscores, "
                "and a name that no other engine process has, for instance slot-1."
            )
        if not self.redis_url:
            raise InvalidConfig("REDIS_URL is not set; for instance redis://127.0.0.1:6379/0.")
        for name, low in _LOWEST.items():
            if getattr(self, name) < low:
                raise InvalidConfig(
                    f"TATKAL_{name.upper()}={getattr(self, name)} must be at least {low}."
                )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read ``TATKAL_SLOT``, ``REDIS_URL``, ``TATKAL_ENGINE``, ``TATKAL_LEASE_MS``, ``TATKAL_DRAIN_S``, ...

        The engine's own settings are looked at too: a malformed one is this process's fault, not a version's.
        """
        EngineConfig.from_env(env, artifact=Path())
        values: dict[str, Any] = {
            "slot": env.get("TATKAL_SLOT", ""),
            "redis_url": env.get("REDIS_URL", ""),
        }
        if engine := env.get("TATKAL_ENGINE"):
            values["engine"] = engine
        for name in _LOWEST:
            if text := env.get(f"TATKAL_{name.upper()}"):
                values[name] = _whole_number(f"TATKAL_{name.upper()}", text)
        return cls(**values)


_LOWEST = {"lease_ms": 100, "drain_s": 0, "stall_s": 1, "load_s": 1, "yield_s": 0}


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidConfig(f"{name}={text!r} must be a whole number.") from error
