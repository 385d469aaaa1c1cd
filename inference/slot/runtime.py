"""A slot becomes a process of the interpreter that its version runs under, and of its first one again for others.

The process replaces itself: it keeps its pid, so whoever supervises it sees nothing, and its lease and claim, so nobody
loads the version meanwhile. An interpreter that dies at once is started again as the slot's first one, which finds the try counted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from inference.protocol import Resident
from inference.replicas import Member
from inference.runtime import Facts, RuntimeRefused, describe, find_interpreter
from inference.slot.config import SlotConfig

logger = logging.getLogger(__name__)

# Longer than a process takes to come up under another interpreter; after it others take the claim.
HANDOVER_MS = 30_000
# They belong to the interpreter that is left.
FOREIGN = ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def enter_runtime(resident: Resident, config: SlotConfig, member: Member) -> str:
    """Return where this process runs under the runtime of ``resident``, with what people are told of it; else replace it.

    Raises:
        RuntimeRefused: the runtime cannot be entered, or is not as it was when the version was registered.
    """
    if resident.runtime != config.runtime:
        _go_on_under(resident, config, member)
    return _check_unchanged(resident, describe()) if resident.runtime else ""


def make_environment(
    env: Mapping[str, str], resident: Resident, config: SlotConfig, handover: str
) -> dict[str, str]:
    """What the process is started with that goes on as this slot under the runtime of ``resident``."""
    return {name: value for name, value in env.items() if name not in FOREIGN} | {
        "TATKAL_RUNTIME": resident.runtime,
        "TATKAL_ENGINE_RUNTIME": resident.runtime_digest,
        "TATKAL_BASE_PYTHON": config.base_python,
        "TATKAL_HANDOVER": handover,
    }


def _check_unchanged(resident: Resident, facts: Facts) -> str:
    if facts.digest != resident.runtime_digest:
        raise RuntimeRefused(
            f"Runtime {resident.runtime!r} is not as it was when {resident.version} was registered: its digest is "
            f"{facts.digest}, not {resident.runtime_digest}. Register the version again, or install what it had."
        )
    return f"{resident.runtime} python {facts.python} torch {facts.packages.get('torch', 'absent')} {facts.digest}"


def _go_on_under(resident: Resident, config: SlotConfig, member: Member) -> NoReturn:
    """Replace this process, with the arguments it was started with; descriptors of ours are closed by it.

    Raises:
        RuntimeRefused: the interpreter cannot be started.
        QueueUnavailable: the lease cannot be handed over.
    """
    python = Path(config.base_python)
    if resident.runtime:
        python = find_interpreter(resident.runtime, config.runtime_roots)
    environment = make_environment(os.environ, resident, config, member.hand_over(HANDOVER_MS))
    logger.info("slot changes its runtime version=%s python=%s", resident.version, python)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(python, [str(python), *sys.orig_argv[1:]], environment)  # noqa: S606 (no shell)
    except OSError as error:
        raise RuntimeRefused(f"Interpreter {str(python)!r} cannot be started: {error}.") from error
