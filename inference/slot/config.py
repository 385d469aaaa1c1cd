"""How one engine process takes part: its name, its Redis, its patience."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from inference.config import EngineConfig, InvalidConfig
from inference.runtime import RuntimeRefused, read_roots


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """Settings of one slot.

    A lease is renewed four times in ``lease_ms``. ``stall_s`` is longer than any step may take, ``load_s`` than any
    version takes to load; after that the process exits. ``yield_s`` is how long a live version may be without a slot
    before one that holds a candidate makes room: longer than a process that died takes to come back. ``engine`` is a
    callable ``(EngineConfig) -> SlotEngine``. ``home`` is where this machine's calibration lies, if it was measured.
    ``metrics_port`` 0 means: no ``/metrics``.

    ``runtime`` is the directory of the virtual environment that this process runs under because a version asked for it,
    empty under the one it was first started with, whose interpreter is ``base_python``. Others may be entered
    below ``runtime_roots``. ``handover`` is what the process left behind that was this one before.
    """

    slot: str
    redis_url: str
    engine: str = "inference.engine.llm_engine:LLMEngine.load"
    lease_ms: int = 2_000
    drain_s: int = 20
    stall_s: int = 30
    load_s: int = 600
    yield_s: int = 15
    home: Path = Path("var")
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    runtime: str = ""
    runtime_roots: tuple[Path, ...] = ()
    base_python: str = sys.executable
    handover: str = ""

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
        if self.metrics_port > MAX_PORT:
            raise InvalidConfig(
                f"TATKAL_METRICS_PORT={self.metrics_port} must be at most {MAX_PORT}, the slot's index included."
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read ``TATKAL_SLOT``, ``REDIS_URL``, ``TATKAL_ENGINE``, ``TATKAL_LEASE_MS``, ``TATKAL_DRAIN_S``, ...

        The engine's own settings are looked at too: a malformed one is this process's fault, not a version's. Where
        several slots share an environment, ``TATKAL_SLOT_INDEX`` is added to ``TATKAL_METRICS_PORT``.
        """
        EngineConfig.from_env(env, artifact=Path())
        values: dict[str, Any] = {
            "slot": env.get("TATKAL_SLOT", ""),
            "redis_url": env.get("REDIS_URL", ""),
        }
        if engine := env.get("TATKAL_ENGINE"):
            values["engine"] = engine
        if home := env.get("TATKAL_HOME"):
            values["home"] = Path(home)
        if host := env.get("TATKAL_METRICS_HOST"):
            values["metrics_host"] = host
        values |= {
            name: text
            for name in ("runtime", "base_python", "handover")
            if (text := env.get(f"TATKAL_{name.upper()}"))
        }
        values["runtime_roots"] = _runtime_roots(env)
        for name in _LOWEST:
            if text := env.get(f"TATKAL_{name.upper()}"):
                values[name] = _whole_number(f"TATKAL_{name.upper()}", text)
        if values.get("metrics_port") and (index := env.get("TATKAL_SLOT_INDEX")):
            values["metrics_port"] += _whole_number("TATKAL_SLOT_INDEX", index)
        return cls(**values)


MAX_PORT = 65_535
_LOWEST = {
    "lease_ms": 100,
    "drain_s": 0,
    "stall_s": 1,
    "load_s": 1,
    "yield_s": 0,
    "metrics_port": 0,
}


def _runtime_roots(env: Mapping[str, str]) -> tuple[Path, ...]:
    try:
        return read_roots(env)
    except RuntimeRefused as error:
        raise InvalidConfig(str(error)) from error


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidConfig(f"{name}={text!r} must be a whole number.") from error
