"""The engine process: a Celery worker whose bootstep owns one engine slot.

    celery -A inference.worker worker -P threads --concurrency 1 -n "$TATKAL_SLOT@%h" \\
        --without-gossip --without-mingle --without-heartbeat --loglevel INFO

Never with ``-P prefork``: the engine lives in the process that starts it. The worker consumes an ordinary control queue
of its own, ``slot.<name>``; requests come past Celery, by the engine's own threads (``inference/engine/intake.py``). The
process exits hard when its engine dies or hangs, and whoever supervises it starts it again; its requests are taken over
when its lease ends. SIGTERM drains it; give it ``TATKAL_DRAIN_S`` and ten seconds more.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pkgutil
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from celery import Celery, bootsteps

from inference.config import EngineConfig, InvalidConfig
from inference.engine.intake import Intake
from inference.engine.loop import Engine, EngineLoop
from inference.protocol import GenerateRequest, Resident, SamplingParams
from inference.queue import Lane, OutageLog, Queue, QueueUnavailable
from inference.replicas import Member, SlotState

logger = logging.getLogger(__name__)

DESIRED_EVERY_S = 1.0
JOIN_S = 8.0  # a call to Redis may take seven seconds to fail
HANG_MARGIN_S = 30.0
_STDERR = 2  # the descriptor: Celery may put something else in the place of sys.stderr
LOAD_RETRIES_S = (1.0, 2.0, 5.0, 15.0, 60.0)


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """How one engine process takes part.

    A lease is renewed four times in ``lease_ms``. ``stall_s`` is longer than any step may take, ``load_s`` than any
    version takes to load; after that the process exits. ``engine`` is a callable ``(EngineConfig) -> Engine``.
    """

    slot: str
    redis_url: str
    engine: str = "inference.engine.llm_engine:LLMEngine.load"
    lease_ms: int = 2_000
    drain_s: int = 20
    stall_s: int = 30
    load_s: int = 600

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", self.slot):
            raise InvalidConfig(
                f"TATKAL_SLOT={self.slot!r} must be 1 to 64 letters, digits, hyphens or underscores, "
                "and a name that no other engine process has, for instance slot-1."
            )
        if not self.redis_url:
            raise InvalidConfig("REDIS_URL is not set; for instance redis://127.0.0.1:6379/0.")
        for name, low in (("lease_ms", 100), ("drain_s", 0), ("stall_s", 1), ("load_s", 1)):
            if getattr(self, name) < low:
                raise InvalidConfig(
                    f"TATKAL_{name.upper()}={getattr(self, name)} must be at least {low}."
                )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read ``TATKAL_SLOT``, ``REDIS_URL``, ``TATKAL_ENGINE``, ``TATKAL_LEASE_MS``, ``TATKAL_DRAIN_S``, ..."""
        values: dict[str, Any] = {
            "slot": env.get("TATKAL_SLOT", ""),
            "redis_url": env.get("REDIS_URL", ""),
        }
        if engine := env.get("TATKAL_ENGINE"):
            values["engine"] = engine
        for name in ("lease_ms", "drain_s", "stall_s", "load_s"):
            if text := env.get(f"TATKAL_{name.upper()}"):
                values[name] = _whole_number(f"TATKAL_{name.upper()}", text)
        return cls(**values)


class Slot:
    """One engine process's life: adopt a resident, load, warm, serve, drain, and again.

    The engine thread does all of that; the keeper renews the lease and watches the engine thread. ``start`` and ``stop``
    may be called twice.
    """

    def __init__(self, config: SlotConfig) -> None:
        self._config = config
        self._queue = Queue(config.redis_url)
        self._member = Member(self._queue, config.slot, lease_ms=config.lease_ms)
        self._outages = OutageLog(logger)
        self._lock = threading.Lock()
        self._loop: EngineLoop | None = None
        self._resident: Resident | None = None
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._busy_since = time.monotonic()
        self._engine_thread = self._new_thread("engine", self._live)
        self._keeper_thread = self._new_thread("keeper", self._keep)

    def start(self) -> None:
        """Take part from now on, also if Redis is not there yet."""
        if not self._engine_thread.ident:
            self._engine_thread.start()
            self._keeper_thread.start()

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
        self._queue.close()

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
                self._stopping.wait(DESIRED_EVERY_S)
                continue
            engine = self._load(resident)
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
        return None

    def _load(self, resident: Resident) -> Engine | None:
        """The engine, warm; None once the resident is not wanted here any more."""
        num_failed, retry_at = 0, 0.0
        while not self._stopping.is_set() and self._still_holds(resident):
            if time.monotonic() < retry_at:
                self._stopping.wait(DESIRED_EVERY_S)
                continue
            self._busy_since = time.monotonic()
            self._member.report(SlotState.LOADING)
            try:
                return self._open_engine(resident)
            except Exception as error:  # whatever it was, it is reported, and this process lives on
                logger.exception("version cannot be loaded version=%s", resident.version)
                self._member.report(
                    SlotState.FAILED, detail=f"{type(error).__name__}: {error}"[:500]
                )
            retry_at = time.monotonic() + LOAD_RETRIES_S[min(num_failed, len(LOAD_RETRIES_S) - 1)]
            num_failed += 1
        return None

    def _open_engine(self, resident: Resident) -> Engine:
        machine = EngineConfig.from_env(os.environ, artifact=Path(resident.artifact))
        load = pkgutil.resolve_name(self._config.engine)
        engine: Engine = load(machine.with_options(resident.engine_options))
        self._member.report(SlotState.WARMING, fingerprint=engine.fingerprint)
        _warm_up(engine)
        return engine

    def _serve(self, resident: Resident, engine: Engine) -> None:
        lane = Lane(resident.endpoint, resident.version)
        loop = EngineLoop(engine, self._queue, lane, self._member)
        intake = Intake(loop, engine, self._queue, lane, self._member)
        with self._lock:
            self._loop, self._resident = loop, resident
            if self._stopping.is_set():
                loop.drain(0)
            else:
                self._member.report(SlotState.READY)
        intake.start(_or_exit)
        self._renew()
        logger.info("slot is ready slot=%s version=%s", self._config.slot, resident.version)
        loop.run()
        intake.stop(JOIN_S)
        with self._lock:
            self._loop, self._resident = None, None

    def _leave(self) -> None:
        try:
            self._member.leave()
        except QueueUnavailable as error:
            logger.warning("lease is left to run out slot=%s error=%s", self._config.slot, error)

    # ------------------------------------------------------------------------------------------------- keeper

    def _keep(self) -> None:
        check_desired_at = 0.0
        while not self._over.wait(self._config.lease_ms / 4000):
            self._check_progress()
            self._renew()
            if time.monotonic() >= check_desired_at:
                check_desired_at = time.monotonic() + DESIRED_EVERY_S
                resident = self._resident
                if resident is not None and not self._still_holds(resident):
                    self._drain(self._config.drain_s)
        faulthandler.cancel_dump_traceback_later()

    def _check_progress(self) -> None:
        """Exit if the engine thread hangs; from outside Python too, should it hang with Python's lock."""
        loop = self._loop
        since = self._busy_since if loop is None else loop.progressed_at
        is_loading = self._member.status.state in (SlotState.LOADING, SlotState.WARMING)
        limit_s = self._config.load_s if is_loading else self._config.stall_s
        if (is_loading or loop is not None) and time.monotonic() - since > limit_s:
            _exit_hard(f"engine thread made no progress for {limit_s} s")
        faulthandler.dump_traceback_later(limit_s + HANG_MARGIN_S, exit=True, file=_STDERR)

    def _renew(self) -> None:
        try:
            if self._member.renew():
                return
        except QueueUnavailable as error:
            self._outages.warn("lease", self._config.slot, error)
            return
        with self._lock:
            if self._loop is not None:
                self._loop.rejoin()
            else:
                self._member.rejoin()

    def _still_holds(self, resident: Resident) -> bool:
        try:
            return self._member.still_holds(resident)
        except QueueUnavailable:
            return True

    def _drain(self, drain_s: float) -> bool:
        """Unready first, then nothing new; whether there is a loop to drain."""
        with self._lock:
            loop = self._loop
            if loop is None or self._member.status.state is SlotState.DRAINING:
                return loop is not None
            self._member.report(SlotState.DRAINING)
            loop.drain(drain_s)
        self._renew()
        return True


def _warm_up(engine: Engine) -> None:
    """One real forward pass, so that the first caller does not pay for what is set up on first use."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    request = GenerateRequest("warm-up", "", sampling, deadline_s=60.0, prompt="Hello")
    engine.add_request(request.id, engine.encode(request), sampling)
    while engine.has_unfinished:
        for output in engine.step():
            if output.failure is not None:
                raise RuntimeError(f"warm-up failed: {output.failure.message}")


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


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidConfig(f"{name}={text!r} must be a whole number.") from error


def _celery_settings() -> dict[str, Any]:
    """Evaluated when a worker starts, not when this module is imported."""
    config = SlotConfig.from_env(os.environ)
    line = "%(asctime)s %(levelname)s %(name)s %(message)s"
    return {
        "broker_url": config.redis_url,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            "socket_timeout": 10,
            "socket_connect_timeout": 3,
            "socket_keepalive": True,
            "retry_on_timeout": True,
            "health_check_interval": 10,
        },
        "task_default_queue": f"slot.{config.slot}",
        "task_ignore_result": True,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "worker_prefetch_multiplier": 1,
        "worker_enable_remote_control": False,
        "worker_send_task_events": False,
        "worker_redirect_stdouts": False,
        "worker_log_format": line,
        "worker_task_log_format": line,
    }


class EngineStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Starts the slot with the worker and drains it before the worker ends; reconnects do not touch it."""

    requires = {"celery.worker.components:Pool"}

    def start(self, worker: Any) -> None:
        """Called once per worker; a second call changes nothing."""
        if not hasattr(worker.app, "slot"):
            worker.app.slot = Slot(SlotConfig.from_env(os.environ))
        worker.app.slot.start()

    def stop(self, worker: Any) -> None:
        """Warm shutdown (SIGTERM)."""
        worker.app.slot.stop()

    def terminate(self, worker: Any) -> None:
        """Cold shutdown (SIGQUIT): nothing is finished, everybody is told."""
        worker.app.slot.stop(drain_s=0)


app = Celery(
    "inference.worker", fixups=[]
)  # none: DJANGO_SETTINGS_MODULE in the environment is not for us
app.add_defaults(_celery_settings)
app.steps["worker"].add(EngineStep)


@app.task(name="slot.status", bind=True)  # type: ignore[untyped-decorator]
def report_status(task: Any) -> str:
    """Report at once, not at the next renewal; the report also lies in the list of slots."""
    report: str = task.app.slot.report_now()
    return report
