"""From a desired resident to an engine that can serve it; one that fails is tried again, and holds up no other."""

from __future__ import annotations

import gc
import logging
import os
import pkgutil
import threading
import time
from pathlib import Path
from typing import Protocol

from inference.calibration import read_calibration
from inference.config import EngineConfig
from inference.engine.contract import Engine
from inference.engine.memory import Usage, offer_to_oom_killer
from inference.engine.telemetry import Telemetry
from inference.planner.shape import InvalidPlan
from inference.protocol import Resident
from inference.queue import QueueUnavailable
from inference.replicas import LoadFailure, Member, SlotState
from inference.slot.config import SlotConfig
from inference.slot.probe import probe
from inference.slot.runtime import enter_runtime

logger = logging.getLogger(__name__)

DESIRED_EVERY_S = 1.0
GIVE_UP_S = 3.0  # a next try that is further away may wait for a slot that has nothing better to do
OOM_SCORE = 600  # while it loads, a version dies of a lack of memory before any that serves


class SlotEngine(Engine, Protocol):
    """What a slot needs of an engine, besides what its loop needs."""

    @property
    def telemetry(self) -> Telemetry:
        """What its steps cost."""

    def usage(self) -> Usage:
        """What it holds now; from any thread."""

    def resize_kv(self, *, is_standby: bool) -> bool:
        """Bring the KV cache to the size of a standby, or to its full one; whether it has that size now."""


class Loader:
    """Loads what the slot adopted, in the engine thread."""

    def __init__(
        self, config: SlotConfig, member: Member, stopping: threading.Event, *, oom_score: int
    ) -> None:
        self._config = config
        self._member = member
        self._stopping = stopping
        self._oom_score = oom_score
        self.started_at = time.monotonic()

    def load(self, resident: Resident) -> SlotEngine | None:
        """The engine, warm and probed; None once this slot has something else to do."""
        adopted_at = time.monotonic()
        offer_to_oom_killer(OOM_SCORE, base=self._oom_score)
        num_tries = 0
        while not self._stopping.is_set():
            num_tries += 1
            failure = self._begin(resident, num_tries)
            self.started_at = time.monotonic()
            self._member.report(SlotState.LOADING)
            try:
                engine = self._open(resident)
            except Exception as error:  # whatever it was, it is reported, and this process lives on
                logger.exception("version cannot be loaded version=%s", resident.version)
                failure = self._fail(failure, error)
            else:
                self._member.end_load(failure)
                self._member.note(loaded_in_s=round(time.monotonic() - adopted_at, 2))
                return engine
            gc.collect()  # what was loaded of it goes before the next try comes
            if not self._wait(resident, failure):
                return None
        return None

    def _begin(self, resident: Resident, num_tries: int) -> LoadFailure:
        """Count the try; one that cannot be counted is made all the same, and known here alone."""
        try:
            return self._member.begin_load(resident, num_tries)
        except Exception:  # a count is no reason to end this process
            logger.exception("try cannot be counted version=%s", resident.version)
            return LoadFailure(
                resident.endpoint, resident.version, resident.artifact, count=num_tries
            )

    def _open(self, resident: Resident) -> SlotEngine:
        runtime = enter_runtime(resident, self._config, self._member)
        self._member.note(runtime=runtime)
        machine = EngineConfig.from_env(os.environ, artifact=Path(resident.artifact))
        load = pkgutil.resolve_name(self._config.engine)
        engine: SlotEngine = load(machine.with_options(resident.engine_options))
        self._member.report(SlotState.WARMING, fingerprint=engine.fingerprint, kernel=engine.kernel)
        calibrate(engine, self._config.home)
        digest = probe(engine)
        self._member.note(probe=digest, weight_bytes=engine.usage().weight_bytes)
        return engine

    def _fail(self, failure: LoadFailure, error: Exception) -> LoadFailure:
        detail = f"{type(error).__name__}: {error}"[:500]
        failure = self._member.fail_load(failure, detail)
        self._member.report(SlotState.FAILED, detail=detail, retry_at=failure.retry_at)
        return failure

    def _wait(self, resident: Resident, failure: LoadFailure) -> bool:
        """Whether the next try is due; False as soon as there is something else to do."""
        retry_at = self._member.clock.to_monotonic(int(failure.retry_at * 1000))
        while not self._stopping.wait(max(0.0, min(DESIRED_EVERY_S, retry_at - time.monotonic()))):
            left_s = retry_at - time.monotonic()
            try:
                adoption = self._member.look_up(resident)
            except QueueUnavailable:
                if left_s > 0:
                    continue
                return True
            if adoption.resident is None:
                return False
            if adoption.has_alternative and left_s > GIVE_UP_S:
                logger.warning(
                    "version is left for another to be loaded version=%s tries=%d",
                    *(resident.version, failure.count),
                )
                return False
            if left_s <= 0:
                return True
        return False


def calibrate(engine: SlotEngine, home: Path) -> None:
    """Have the engine compared with what its machine can do, if that was measured; from any thread, and again."""
    try:
        calibration = read_calibration(home)
    except InvalidPlan as error:
        logger.warning("no calibration error=%s", error)
        return
    if calibration is not None:
        engine.telemetry.calibrate(calibration.device())
