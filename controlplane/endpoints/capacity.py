"""Whether a version can be loaded beside what is resident, told before a slot tries it.

It asks what the engine asks when it loads, with the same arithmetic. What nobody knows counts as there: a refusal is for
what clearly cannot be.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from django.conf import settings

from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.slots import Report
from controlplane.errors import DomainError
from controlplane.registry.models import Version
from controlplane.registry.plans import VersionShape, describe
from inference.config import InvalidConfig
from inference.machine import available_bytes
from inference.planner import memory
from inference.planner.memory import Footprint
from inference.planner.shape import InvalidPlan
from inference.replicas import SlotStatus

logger = logging.getLogger(__name__)

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Fit:
    """What a version needs, and what there is for it. ``freed`` is what the candidate takes whose place it gets.

    ``needed`` is None where the artifact cannot be read here, ``available`` where nobody says or slots run elsewhere.
    """

    version: str
    needed: Footprint | None
    available: int | None
    freed: int
    residents: tuple[tuple[str, str, int], ...]
    is_resident: bool = False

    @property
    def fits(self) -> bool:
        """False only where it clearly cannot be loaded."""
        if self.is_resident or self.needed is None or self.available is None:
            return True
        return self.needed.total <= self.available + self.freed

    @property
    def room(self) -> int | None:
        """Bytes that it may take."""
        return None if self.available is None else self.available + self.freed

    def tell(self) -> str:
        """The numbers and the mend, in a sentence or two."""
        if self.needed is None or self.room is None:
            return f"{self.version}: nobody knows here what it needs, or what there is."
        beside = ", ".join(
            f"{version} in {slot}, {_mib(num_bytes)} of weights"
            for slot, version, num_bytes in self.residents
        )
        return (
            f"{self.version} needs {_mib(self.needed.total)} (weights {_mib(self.needed.weights)}, KV cache "
            f"{_mib(self.needed.kv_cache)}, working space {_mib(self.needed.working)}), and {_mib(self.room)} are "
            f"available{f' beside {beside}' if beside else ''}. Let other versions go, register it with narrower "
            "weights or a smaller max_model_len, or give the machine more memory."
        )

    def details(self) -> dict[str, Any]:
        """The numbers for programs."""
        needed = self.needed
        return {
            "fit": {
                "needed_bytes": needed.total if needed else None,
                "weight_bytes": needed.weights if needed else None,
                "kv_bytes": needed.kv_cache if needed else None,
                "working_bytes": needed.working if needed else None,
                "available_bytes": self.room,
                "residents": [
                    {"slot": slot, "version": version, "weight_bytes": num_bytes}
                    for slot, version, num_bytes in self.residents
                ],
            }
        }


class DoesNotFit(DomainError):
    """A version that cannot be loaded beside what is resident."""

    code = "does_not_fit"
    status = HTTPStatus.CONFLICT
    permanent = False


def fits_as_candidate(version: Version, *, endpoint: Endpoint | None, report: Report | None) -> Fit:
    """Whether ``version`` could be loaded as the candidate of ``endpoint``; None: as that of any endpoint.

    ``report`` is what slots say, None while Redis is away. The candidate that it would take the place of is let go first.
    """
    slots = report.slots if report else ()
    name = endpoint.name if endpoint else None
    holds = [
        slot for slot in slots if slot.version == version.name and name in (None, slot.endpoint)
    ]
    leaving = endpoint.candidate if endpoint else None
    freed = sum(
        _held_bytes(slot, leaving)
        for slot in slots
        if leaving and (slot.endpoint, slot.version) == (name, leaving.name) != (name, version.name)
    )
    return Fit(
        version=version.name,
        needed=_needed(version),
        available=available_bytes() if settings.SLOTS_ARE_HERE else None,
        freed=freed,
        residents=tuple(
            (slot.slot, slot.version, slot.weight_bytes) for slot in slots if slot.weight_bytes
        ),
        is_resident=bool(holds),
    )


def check_candidate(version: Version, *, endpoint: Endpoint | None, report: Report | None) -> None:
    """Return if ``version`` may be loaded as the candidate of ``endpoint``.

    Raises:
        DoesNotFit: it clearly cannot; message and details have the numbers.
    """
    fit = fits_as_candidate(version, endpoint=endpoint, report=report)
    if not fit.fits:
        raise DoesNotFit(fit.tell(), details=fit.details())


def _needed(version: Version) -> Footprint | None:
    try:
        found = describe(version)
        num_blocks, block_bytes = _standby(version, found)
    except (InvalidPlan, InvalidConfig) as error:
        logger.info("needs of a version are not known version=%s reason=%s", version.name, error)
        return None
    return memory.load_footprint(
        found.manifest.model,
        weight_bytes=found.shape.weight_bytes,
        kv_bytes=num_blocks * block_bytes,
    )


def _standby(version: Version, found: VersionShape) -> tuple[int, int]:
    """Blocks that it is loaded with, and bytes of each: it grows when it is asked."""
    config = settings.ENGINE.with_options({"dtype": version.dtype, **version.engine_options})
    block_bytes = config.block_size * memory.kv_bytes_per_token(found.shape, found.kv)
    full = memory.pool_blocks(config, max_model_len=found.context, block_bytes=block_bytes)
    standby = memory.standby_blocks(
        full=full,
        standby_bytes=config.standby_kv_bytes,
        block_bytes=block_bytes,
        block_size=config.block_size,
    )
    return standby, block_bytes


def _held_bytes(slot: SlotStatus, version: Version) -> int:
    try:
        _, block_bytes = _standby(version, describe(version))
    except (InvalidPlan, InvalidConfig):
        block_bytes = 0
    return slot.weight_bytes + slot.kv_blocks * block_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB"
