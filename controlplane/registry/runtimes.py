"""What a runtime has that a version is to run under: asked of its own interpreter, in a child with limits."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from controlplane.registry.imports import CHILD_ENVIRONMENT, PROJECT_ROOT, limit_memory
from inference.runtime import Facts, RuntimeRefused, find_interpreter

INTERPRETER, DIGEST = "interpreter", "digest"
TIMEOUT_S = 60.0
MEMORY_BYTES = 2 * 2**30
MAX_TOLD = 300


def inspect(runtime: str, roots: Sequence[Path], *, timeout_s: float = TIMEOUT_S) -> Facts:
    """What the virtual environment at ``runtime`` has; it has all that a slot needs.

    Raises:
        RuntimeRefused: it is outside ``roots``, cannot be run, does not answer in time, or lacks something.
    """
    python = find_interpreter(runtime, roots)
    facts = _ask(python, runtime, timeout_s)
    if facts.missing:
        needed = ", ".join(facts.missing)
        raise RuntimeRefused(
            f"Runtime {runtime!r} lacks {needed}. Install what is missing there, and register the version again."
        )
    return facts


def _ask(python: Path, runtime: str, timeout_s: float) -> Facts:
    child = subprocess.Popen(  # noqa: S603 (its directory was allowed by whoever runs this machine)
        [str(python), "-m", "inference.runtime"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=PROJECT_ROOT,
        env={name: os.environ[name] for name in CHILD_ENVIRONMENT if name in os.environ},
    )
    try:
        limit_memory(child.pid, MEMORY_BYTES)
        output, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeRefused(
            f"Runtime {runtime!r} did not say within {timeout_s:g} s what it has."
        ) from error
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate(timeout=10)
    try:
        return Facts.from_json(output)
    except (ValueError, KeyError, TypeError) as error:
        told = errors.decode(errors="replace").strip()[-MAX_TOLD:] or f"status {child.returncode}"
        raise RuntimeRefused(f"Runtime {runtime!r} cannot say what it has: {told}") from error
