"""The interpreter and libraries that a version runs under: a virtual environment below an allowed directory.

A library of another release can change a token, so a *runtime* belongs to a version. It is named by its directory and pinned by
a digest over everything that is installed in it. As a program, ``python -m inference.runtime`` prints what the interpreter that
runs it has, for whoever wants to know before anything is loaded there.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

# What a slot imports, besides the standard library and this project.
NEEDED = (
    "celery",
    "jinja2",
    "numpy",
    "prometheus_client",
    "redis",
    "safetensors",
    "tokenizers",
    "torch",
)
OURS = "tatkal"  # it comes from where the slot was started, and not from the runtime
LONGEST_NAME = 80


class RuntimeRefused(ValueError):
    """A runtime that cannot be used; the message names it, what is wrong, and the mend."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What an interpreter has: its own release, the machine, every library with its release, and what a slot would miss."""

    python: str
    machine: str
    packages: Mapping[str, str]
    missing: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The same where interpreter, machine and every library are of the same release."""
        text = json.dumps([self.python, self.machine, sorted(self.packages.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``."""
        data: dict[str, Any] = json.loads(text)
        return cls(data["python"], data["machine"], data["packages"], tuple(data["missing"]))


def describe() -> Facts:
    """What the interpreter has that runs this."""
    packages: dict[str, str] = {}
    for found in metadata.distributions():
        name = _normalize(found.metadata["Name"] or "")
        # Of two with one name the first on the path is imported.
        if name and name != OURS:
            packages.setdefault(name, found.version)
    missing = tuple(name for name in NEEDED if find_spec(name) is None)
    return Facts(platform.python_version(), platform.machine(), packages, missing)


def find_interpreter(runtime: str, roots: Sequence[Path]) -> Path:
    """The interpreter of the virtual environment at ``runtime``.

    The directory itself lies below ``roots``, links followed; the interpreter in it is a link to that of the system, as
    virtual environments have it.

    Raises:
        RuntimeRefused: it is outside ``roots``, or has no interpreter that can be run.
    """
    path = Path(runtime)
    if not path.is_absolute() or "\0" in runtime:
        raise RuntimeRefused(f"Runtime {runtime!r} must be an absolute path.")
    real = Path(os.path.realpath(path))
    allowed = [Path(os.path.realpath(root)) for root in roots]
    if not any(real.is_relative_to(root) and real != root for root in allowed):
        told = ", ".join(map(str, allowed)) or "none"
        raise RuntimeRefused(
            f"Runtime {runtime!r} leads to {str(real)!r}, outside the allowed directories ({told}). Make the virtual "
            "environment below one of them, or add its directory to TATKAL_RUNTIME_ROOTS and start again."
        )
    python = real / "bin" / "python"
    if not python.is_file() or not os.access(python, os.X_OK):
        raise RuntimeRefused(
            f"Runtime {runtime!r} has no bin/python that can be run. Make it with `python -m venv {runtime}`."
        )
    return python


def read_roots(env: Mapping[str, str]) -> tuple[Path, ...]:
    """The allowed directories of ``TATKAL_RUNTIME_ROOTS``, by colons; without it those below ``TATKAL_HOME``.

    Raises:
        RuntimeRefused: one of them is no absolute path.
    """
    named = [Path(part) for part in env.get("TATKAL_RUNTIME_ROOTS", "").split(":") if part]
    if wrong := [path for path in named if not path.is_absolute()]:
        raise RuntimeRefused(f"TATKAL_RUNTIME_ROOTS: {str(wrong[0])!r} must be an absolute path.")
    return tuple(named) or (Path(env.get("TATKAL_HOME") or "var").absolute() / "runtimes",)


def _normalize(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")[:LONGEST_NAME]


if __name__ == "__main__":
    sys.stdout.write(describe().to_json() + "\n")
