"""The engine process: a Celery worker whose bootstep owns one engine slot.

    celery -A inference.worker worker -P threads --concurrency 1 -n "$TATKAL_SLOT@%h" \\
        --without-gossip --without-mingle --without-heartbeat --loglevel INFO

Never with ``-P prefork``: the engine lives in the process that starts it. The worker consumes an ordinary control queue
of its own, ``slot.<name>``; requests come past Celery, by the engine's own threads (``inference/engine/intake.py``). The
process exits hard when its engine dies or hangs, and whoever supervises it starts it again; its requests are taken over
when its lease ends. SIGTERM drains it; give it ``TATKAL_DRAIN_S`` and ten seconds more.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, bootsteps

from inference.slot.config import SlotConfig
from inference.slot.life import Slot


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
