"""The gateway process: one async middleware, no apps, no database, no sessions."""

from __future__ import annotations

from logging import LogRecord

from controlplane.settings.base import *

ROOT_URLCONF = "controlplane.gateway.urls"
MIDDLEWARE = ["controlplane.gateway.middleware.authenticate"]
INSTALLED_APPS: list[str] = []
DATABASES: dict[str, dict[str, str]] = {}
TEMPLATES: list[dict[str, str]] = []
USE_I18N = False

LIFESPAN = "controlplane.gateway.runtime.lifespan"
HEALTH_CHECKS = {
    "redis": "controlplane.gateway.runtime.check_redis",
    "slots": "controlplane.gateway.runtime.check_slots",
}
STARTUP_CHECKS = ["redis"]

REQUEST_DEADLINE_S = env_int("TATKAL_REQUEST_DEADLINE_S", 300, low=1, high=3600)
MAX_BODY_BYTES = env_int("TATKAL_MAX_BODY_BYTES", 2**20, low=1024, high=64 * 2**20)
# controlplane.asgi has counted the body already; it stays in memory, and Django's lower limit must not answer first.
DATA_UPLOAD_MAX_MEMORY_SIZE = MAX_BODY_BYTES
FILE_UPLOAD_MAX_MEMORY_SIZE = MAX_BODY_BYTES


def _has_traceback(record: LogRecord) -> bool:
    return record.exc_info is not None


# Django would write a line for every reply of 400 and above: an overload would drown in its own 429 and 503. They are
# counted in /metrics instead, and only faults of ours, which have a traceback, are logged.
LOGGING = {
    **LOGGING,
    "filters": {"faults": {"()": "django.utils.log.CallbackFilter", "callback": _has_traceback}},
    "loggers": {"django.request": {"filters": ["faults"]}},
}
