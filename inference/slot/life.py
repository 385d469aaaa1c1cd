"""One engine slot: adopts a resident, loads it, serves it, drains, and again."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import threading
import time
from collections.abc import Callable

from inference.engine.copy_intake import CopyIntake
from inference.engine.intake import Intake
from inference.engine.loop import EngineLoop
from inference.engine.memory import oom_score
from inference.protocol import Resident
from inference.queue import Lane, OutageLog, Queue, QueueUnavailable
from inference.replicas import Member, SlotState
from inference.slot.config import SlotConfig
from inference.slot.loading import DESIRED_EVERY_S, Loader, SlotEngine, calibrate
from inference.slot.metrics import MetricsServer, SlotMetrics, open_metrics
from inference.slot.residency import Residency

logger = logging.getLogger(__name__)

ADOPT_EVERY_S = 0.25  # an idle slot has nothing else to do, and at a start everybody waits for it
CALIBRATE_EVERY_S = 30.0  # the machine may be measured while it serves
JOIN_S = 8.0  # a call to Redis may take seven seconds to fail
HANG_MARGIN_S = 30.0
_STDERR = 2  # the descriptor: Celery may put something else in the place of sys.stderr


class Slot:
    """One engine process's life.

    The engine thread does all of it; the keeper renews the lease, watches the engine thread, and follows the desired
    state. ``start`` and ``stop`` may be called twice.
    """

    def __init__(self, config: SlotConfig) -> None:
        self._config = config
        self._queue = Queue(config.redis_url)
        self._member = Member(
            self._queue, config.slot, lease_ms=config.lease_ms, handover=config.handover
        )
        self._outages = OutageLog(logger)
        self._oom_score = oom_score()
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._loader = Loader(config, self._member, self._stopping, oom_score=self._oom_score)
        self._lock = threading.Lock()
        self._residency: Residency | None = None
        self._metrics = SlotMetrics(lambda: self._member.status, lambda: self._residency)
        self._metrics_server: MetricsServer | None = None
        self._engine_thread = self._new_thread("engine", self._live)
        self._keeper_thread = self._new_thread("keeper", self._keep)

    def start(self) -> None:
        """Take part from now on, also if Redis is not there yet."""
        if not self._engine_thread.ident:
            self._engine_thread.start()
            self._keeper_thread.start()
            address = (self._config.metrics_host, self._config.metrics_port)
            self._metrics_server = open_metrics(self._metrics, *address)

    def stop(self, drain_s: float | None = None) -> None:
        """Take no more requests, finish what runs within ``drain_s`` seconds, give the rest back, leave."""
        drain_s = self._config.drain_s if drain_s is None else drain_s
        self._stopping.set()
        if not self._engine_thread.ident:
            return
        is_serving = self._drain(drain_s)
        self._engine_thread.join(drain_s + JOIN_S if is_serving else JOIN_S)
        if self._engine_thread.is_alive():
            _exit_hard("engine thread did not end in time")
        self._over.set()
        self._keeper_thread.join(JOIN_S)
        self._leave()  # the keeper may have reported once more in between
        self._queue.close()
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None

    def report_now(self) -> str:
        """Renew lease and report at once; what was reported, as JSON."""
        self._renew()
        return self._member.status.to_json()

    def _new_thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=_or_exit, args=(body,), name=name, daemon=True)

    # ------------------------------------------------------------------------------------------ engine thread

    def _live(self) -> None:
        while not self._stopping.is_set():
            resident = self._adopt()
            if resident is None:
                self._stopping.wait(ADOPT_EVERY_S)
                continue
            engine = self._loader.load(resident)
            if engine is not None:
                self._serve(resident, engine)
            del engine
            gc.collect()  # its tensors go before the next version's come
            self._leave()

    def _adopt(self) -> Resident | None:
        try:
            if self._member.renew():
                return self._member.adopt()
            self._member.rejoin()
        except QueueUnavailable as error:
            self._outages.warn("slot", self._config.slot, error)
            self._member.unsettle()
        return None

    def _serve(self, resident: Resident, engine: SlotEngine) -> None:
        lane = Lane(resident.endpoint, resident.version)
        loop = EngineLoop(engine, self._queue, lane, self._member)
        intake = Intake(loop, engine, self._queue, lane, self._member)
        copy_intake = CopyIntake(loop, engine, self._queue, lane, self._member)
        residency = Residency(resident, engine, loop, self._member, oom_score=self._oom_score)
        residency.fit()
        with self._lock:
            self._residency = residency
            if self._stopping.is_set():
                loop.drain(0)
            else:
                self._member.report(SlotState.READY, detail=self._member.status.detail)
        intake.start(_or_exit)
        copy_intake.start(_or_exit)
        self._renew()
        logger.info("slot is ready slot=%s version=%s", self._config.slot, resident.version)
        loop.run()
        intake.stop(JOIN_S)
        copy_intake.stop(JOIN_S)
        with self._lock:
            self._residency = None

    def _leave(self) -> None:
        try:
            self._member.leave()
        except QueueUnavailable as error:
            logger.warning("lease is left to run out slot=%s error=%s", self._config.slot, error)

    # ------------------------------------------------------------------------------------------------- keeper

    def _keep(self) -> None:
        check_desired_at = 0.0
        calibrate_at = time.monotonic() + CALIBRATE_EVERY_S
        while not self._over.wait(self._config.lease_ms / 4000):
            self._check_progress()
            self._renew()
            if time.monotonic() >= check_desired_at:
                check_desired_at = time.monotonic() + DESIRED_EVERY_S
                self._follow_desired()
            if time.monotonic() >= calibrate_at and (residency := self._residency) is not None:
                calibrate_at = time.monotonic() + CALIBRATE_EVERY_S
                calibrate(residency.engine, self._config.home)
        faulthandler.cancel_dump_traceback_later()

    def _follow_desired(self) -> None:
        residency = self._residency
        if residency is None:
            return
        try:
            adoption = self._member.look_up(residency.resident)
        except QueueUnavailable:
            return
        if residency.follow(adoption, yield_s=self._config.yield_s):
            return
        if adoption.resident is not None:
            logger.warning(
                "slot yields to a live or previous version without one slot=%s version=%s",
                *(self._config.slot, residency.resident.version),
            )
        self._drain(self._config.drain_s)

    def _check_progress(self) -> None:
        """Exit if the engine thread hangs; from outside Python too, should it hang with Python's lock."""
        residency = self._residency
        since = self._loader.started_at if residency is None else residency.loop.progressed_at
        is_loading = self._member.status.state in (SlotState.LOADING, SlotState.WARMING)
        limit_s = self._config.load_s if is_loading else self._config.stall_s
        if (is_loading or residency is not None) and time.monotonic() - since > limit_s:
            _exit_hard(f"engine thread made no progress for {limit_s} s")
        faulthandler.dump_traceback_later(limit_s + HANG_MARGIN_S, exit=True, file=_STDERR)

    def _renew(self) -> None:
        residency = self._residency
        if residency is not None:
            residency.note_usage()
        try:
            if self._member.renew():
                return
        except QueueUnavailable as error:
            self._outages.warn("lease", self._config.slot, error)
            return
        with self._lock:
            if self._residency is not None:
                self._residency.loop.rejoin()
            else:
                self._member.rejoin()

    def _drain(self, drain_s: float) -> bool:
        """Unready first, then nothing new; whether there is a loop to drain."""
        with self._lock:
            residency = self._residency
            if residency is None or self._member.status.state is SlotState.DRAINING:
                return residency is not None
            self._member.report(SlotState.DRAINING)
            residency.loop.drain(drain_s)
        self._renew()
        return True


def _or_exit(body: Callable[[], None]) -> None:
    """Run a thread's body. A slot that lost a thread would only look alive."""
    try:
        body()
    except BaseException:
        logger.exception("thread died thread=%s", threading.current_thread().name)
        _exit_hard(f"{threading.current_thread().name} thread died")


def _exit_hard(reason: str) -> None:
    logger.critical("process exits: %s", reason)
    logging.shutdown()
    os._exit(1)
