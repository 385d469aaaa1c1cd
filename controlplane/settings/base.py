"""Every setting that comes from the environment is read here, once; a malformed value stops the process."""

from __future__ import annotations

import math
import os
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured


def env_str(name: str, default: str | None = None) -> str:
    """The variable, or the file that ``<name>_FILE`` points to, or ``default``."""
    if value := os.environ.get(name):
        return value
    if path := os.environ.get(f"{name}_FILE"):
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ImproperlyConfigured(f"{name}_FILE={path!r} cannot be read: {error}.") from error
    if default is None:
        raise ImproperlyConfigured(f"{name} is not set; set it, or start with `make run`.")
    return default


def env_int(name: str, default: int, *, low: int = 0, high: int = 2**31 - 1) -> int:
    """The variable as a whole number from ``low`` to ``high``."""
    text = os.environ.get(name) or str(default)
    try:
        value = int(text)
    except ValueError as error:
        raise ImproperlyConfigured(f"{name}={text!r} must be a whole number.") from error
    if not low <= value <= high:
        raise ImproperlyConfigured(f"{name}={value} must be from {low} to {high}.")
    return value


def env_amount(name: str) -> float | None:
    """The variable as a number that is not negative, or None where it is not set."""
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise ImproperlyConfigured(
            f"{name}={text!r} must be a number, for instance 1.25."
        ) from error
    if not 0 <= value < math.inf:
        raise ImproperlyConfigured(f"{name}={text} must be a number from 0 on.")
    return value


def env_bool(name: str, default: bool) -> bool:
    """The variable as ``true`` or ``false``; nothing else is taken for either."""
    text = os.environ.get(name) or str(default)
    if text.lower() not in ("true", "false"):
        raise ImproperlyConfigured(f"{name}={text!r} must be true or false.")
    return text.lower() == "true"


def env_list(name: str, default: str) -> list[str]:
    """The variable split at commas, without blanks."""
    return [part.strip() for part in (os.environ.get(name) or default).split(",") if part.strip()]


def env_roots(name: str, default: Path) -> tuple[Path, ...]:
    """The variable split at colons into absolute directories, which need not exist yet."""
    roots = tuple(Path(part) for part in os.environ.get(name, "").split(":") if part) or (default,)
    for root in roots:
        if not root.is_absolute():
            raise ImproperlyConfigured(f"{name}: {str(root)!r} must be an absolute path.")
    return roots


TATKAL_HOME = Path(env_str("TATKAL_HOME", "var")).resolve()
REDIS_URL = env_str("REDIS_URL")
GATEWAY_PORT = env_int("PORT", 8000, low=1, high=65535)
CONTROL_PORT = env_int("CONTROL_PORT", GATEWAY_PORT + 1, low=1, high=65535)

# Of one client to one process; 0 is no limit.
CONNECTIONS_PER_ADDRESS = env_int("TATKAL_CONNECTIONS_PER_ADDRESS", 512, high=1_000_000)

SECRET_KEY = env_str("TATKAL_SECRET_KEY")
DEBUG = False
ALLOWED_HOSTS = env_list("TATKAL_ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]")

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"},
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": env_str("TATKAL_LOG_LEVEL", "INFO")},
}
