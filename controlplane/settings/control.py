"""Settings of the control process, its workers and commands: database, admin, REST."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import dj_database_url
from csp.constants import NONE, SELF, UNSAFE_EVAL, UNSAFE_INLINE
from django.core.exceptions import ImproperlyConfigured
from django.templatetags.static import static

from controlplane.settings.base import *
from controlplane.settings.menu import MENU
from inference.config import EngineConfig, InvalidConfig

ROOT_URLCONF = "controlplane.urls"
LIFESPAN = "controlplane.api.fleet.lifespan"
HEALTH_CHECKS = {"database": "controlplane.api.checks.check_database"}
STARTUP_CHECKS = ("database",)
MAX_BODY_BYTES = 2**20
MAX_IMPORT_MEMORY_BYTES = 64 * 2**30

INSTALLED_APPS = [
    # Before unfold, whose templates it replaces.
    "controlplane.console",
    "unfold",
    "unfold.contrib.filters",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "controlplane.events",
    "controlplane.access",
    "controlplane.registry",
    "controlplane.endpoints",
    "controlplane.monitoring",
    "controlplane.rollouts",
    "controlplane.dashboard",
    "axes",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "csp.middleware.CSPMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "axes.middleware.AxesMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

# --- Database: SQLite in the home, or what DATABASE_URL names.
DATABASES = {
    "default": dj_database_url.parse(
        env_str("DATABASE_URL", f"sqlite:///{TATKAL_HOME / 'tatkal.sqlite3'}"), conn_max_age=0
    )
}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    DATABASES["default"]["OPTIONS"] = {
        # Writers queue at BEGIN instead of failing when they upgrade a read; WAL lets readers go on meanwhile.
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        # FULL: a promote or a rollback that was confirmed must survive a power cut. In WAL mode NORMAL may lose the
        # last commits; FULL costs one fsync a commit, and the one busy writer commits in batches.
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
    }
if DATABASES["default"]["ENGINE"] == "django.db.backends.postgresql":
    DATABASES["default"]["OPTIONS"] = {
        # A server that hangs, or a row that somebody keeps locked, must not hold a thread for ever: there are few.
        "connect_timeout": 5,
        "options": "-c statement_timeout=30000 -c lock_timeout=10000",
        # What DATABASE_URL says itself comes first.
        **DATABASES["default"].get("OPTIONS", {}),
    }

# --- People: sessions of the admin. Cookies have names of their own, because cookies do not know ports and 127.0.0.1
# has many.
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
    "controlplane.access.roles.RoleBackend",
]
LOGIN_URL = "admin:login"
SESSION_COOKIE_NAME = "tatkal_session"
SESSION_COOKIE_AGE = 8 * 3600
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_NAME = "tatkal_csrf"
CSRF_COOKIE_SAMESITE = "Lax"
# Ten wrong passwords for one name from one address close the door for that pair for five minutes.
AXES_FAILURE_LIMIT = 10
AXES_COOLOFF_TIME = timedelta(minutes=5)
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_LOCKOUT_TEMPLATE = "tatkal/locked_out.html"
AXES_RESET_ON_SUCCESS = True
AXES_DISABLE_ACCESS_LOG = True
AXES_ENABLE_ADMIN = False
AXES_VERBOSE = False
CSRF_TRUSTED_ORIGINS = env_list("TATKAL_CSRF_TRUSTED_ORIGINS", "")
X_FRAME_OPTIONS = "DENY"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
# Pages load nothing from elsewhere and run no script that stands in the page. unfold's Alpine compiles the
# expressions in its attributes ('unsafe-eval') and sets styles ('unsafe-inline').
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF, UNSAFE_EVAL],
        "style-src": [SELF, UNSAFE_INLINE],
        "img-src": [SELF, "data:"],
        "object-src": [NONE],
        "base-uri": [NONE],
        "form-action": [SELF],
        "frame-ancestors": [NONE],
    }
}

# --- HTTPS: on with TATKAL_HTTPS=true behind a proxy that ends TLS and sets X-Forwarded-Proto. Without it the process
# is meant for loopback, where no certificate can be had, and only then are the deployment checks that ask for TLS
# silent: with a public name in TATKAL_ALLOWED_HOSTS they speak again.
HTTPS = env_bool("TATKAL_HTTPS", False)
SESSION_COOKIE_SECURE = HTTPS
CSRF_COOKIE_SECURE = HTTPS
SECURE_SSL_REDIRECT = HTTPS
if HTTPS:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SECURE_HSTS_SECONDS = 30 * 24 * 3600
LOOPBACK_HOSTS = {"127.0.0.1", "localhost", "[::1]"}
SILENCED_SYSTEM_CHECKS = []
if HTTPS:
    # W005, W021: subdomains and the browsers' preload list belong to whoever owns the domain.
    SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]
elif set(ALLOWED_HOSTS) <= LOOPBACK_HOSTS:
    # W004 HSTS, W008 redirect to HTTPS, W012 and W016 secure cookies.
    SILENCED_SYSTEM_CHECKS = ["security.W004", "security.W008", "security.W012", "security.W016"]

# --- Static files of the admin, straight from the packages: no collectstatic before the first start.
STATIC_URL = "/static/"
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = False
WHITENOISE_ALLOW_ALL_ORIGINS = False
# They are small, so reading one whole, which is what the warning is about, is right.
warnings.filterwarnings(
    "ignore", message="StreamingHttpResponse must consume synchronous iterators", category=Warning
)

# --- REST: bearer tokens alone, no cookies, and nothing is allowed that a view did not ask for.
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["controlplane.api.drf.ControlTokenAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["controlplane.api.drf.HasRole"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_PAGINATION_CLASS": "controlplane.api.drf.Pages",
    "EXCEPTION_HANDLER": "controlplane.api.problems.to_problem",
    "UNAUTHENTICATED_USER": None,
    "DEFAULT_METADATA_CLASS": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Tatkal control API",
    "DESCRIPTION": "Models, versions, endpoints, rollouts, keys and the request log. Errors are application/problem+json.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["controlplane.api.drf.HasRole"],
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "COMPONENT_SPLIT_REQUEST": True,
    "ENUM_NAME_OVERRIDES": {
        "SlotState": [
            (state, state)
            for state in ("waiting", "loading", "warming", "ready", "draining", "failed")
        ],
        "VersionState": "controlplane.registry.models.Version.State",
        "InFlightPolicy": "controlplane.endpoints.models.Endpoint.InFlight",
        "RolloutState": "controlplane.rollouts.machine.State",
        "PairState": "controlplane.rollouts.pairs.Pair.State",
    },
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "controlplane.api.problems.describe_problems",
    ],
}

FORMAT_MODULE_PATH = ["controlplane.settings.formats"]


def default_import_memory_bytes() -> int:
    """64 GiB, or all that this machine has where that is less; 64 GiB where it does not tell."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return MAX_IMPORT_MEMORY_BYTES
    return min(MAX_IMPORT_MEMORY_BYTES, physical) if physical > 0 else MAX_IMPORT_MEMORY_BYTES


UNFOLD = {
    "SITE_TITLE": "Tatkal",
    "SITE_HEADER": "Tatkal",
    "SITE_SYMBOL": "bolt",
    "SITE_FAVICONS": [
        {
            "rel": "icon",
            "type": "image/svg+xml",
            "sizes": "any",
            "href": lambda _request: static("tatkal/favicon.svg"),
        }
    ],
    "STYLES": [
        lambda _request: static("tatkal/admin.css"),
        lambda _request: static("dashboard/charts.css"),
    ],
    "SHOW_HISTORY": False,
    "SHOW_VIEW_ON_SITE": False,
    "SIDEBAR": {
        "navigation": [{"title": title, "items": items} for title, items in MENU.items()],
    },
}

# Several tasks a second that found nothing to do are no news, nor is a login that went well.
LOGGING["loggers"] = {
    name: {"level": "WARNING"}
    for name in ("axes", "celery.app.trace", "celery.worker.strategy", "celery.beat")
}

# --- Engine slots, as far as they share this environment; a plan for a version is made with their settings. Slots that
# reach Redis by loopback run on this machine, and one on the CPU takes its memory.
try:
    ENGINE = EngineConfig.from_env(os.environ, artifact=Path())
except InvalidConfig as error:
    raise ImproperlyConfigured(str(error)) from error
SLOTS_ARE_HERE = ENGINE.device == "cpu" and urlsplit(REDIS_URL).hostname in {
    "127.0.0.1",
    "localhost",
    "::1",
}

# --- Imports and retention. Sources of versions lie below MODEL_ROOTS or in the package with the demo weights.
ARTIFACT_ROOT = TATKAL_HOME / "artifacts"
MODEL_ROOTS = env_roots("TATKAL_MODEL_ROOTS", TATKAL_HOME / "models")
# Virtual environments that versions may run under lie below these.
RUNTIME_ROOTS = env_roots("TATKAL_RUNTIME_ROOTS", TATKAL_HOME / "runtimes")
# Says which of two answers is better: module:function, or the address of a judge; empty: nobody.
SCORER = env_str("TATKAL_SCORER", "")
SCORER_TOKEN = env_str("TATKAL_SCORER_TOKEN", "")
SCORER_TIMEOUT_S = env_int("TATKAL_SCORER_TIMEOUT_S", 10, low=1, high=60)

IMPORT_TIMEOUT_S = env_int("TATKAL_IMPORT_TIMEOUT_S", 1800, low=1)
IMPORT_MEMORY_BYTES = env_int(
    "TATKAL_IMPORT_MEMORY_BYTES", default_import_memory_bytes(), low=2**28, high=2**50
)
LOG_RETENTION = timedelta(days=env_int("TATKAL_LOG_DAYS", 30, low=1, high=3650))
TEXT_RETENTION = timedelta(days=env_int("TATKAL_TEXT_DAYS", 7, low=1, high=3650))

# --- What an hour of one engine slot costs, in whatever currency; None: usage is told in engine seconds alone.
COST_PER_HOUR = env_amount("TATKAL_COST_PER_HOUR")

# --- What `manage.py prepare` starts: engine slots, each with its /metrics from METRICS_PORT on. None: it finds free ports.
ENGINE_SLOTS = env_int("TATKAL_ENGINE_SLOTS", 3, low=1, high=1000)
METRICS_PORT = (
    env_int("TATKAL_METRICS_PORT", 0, high=65535) if os.environ.get("TATKAL_METRICS_PORT") else None
)
# Of work that was carried out; the events that it came from stay.
OUTBOX_RETENTION = timedelta(days=env_int("TATKAL_OUTBOX_DAYS", 7, low=1, high=3650))
