"""`manage.py prepare`: everything a start needs, and with ``--run`` the start itself.

It asks nothing, may be interrupted anywhere, and does at the next start only what is missing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import BaseCommand, CommandError, call_command
from django.db import transaction
from django.utils import timezone
from django.utils.crypto import get_random_string

from controlplane.access import services as access
from controlplane.access.models import ApiKey
from controlplane.console import home as homes
from controlplane.console.home import Home
from controlplane.console.redis_server import (
    NoRedisServer,
    check_not_running,
    find_server,
    write_config,
)
from controlplane.endpoints import services as endpoints
from controlplane.endpoints.models import Endpoint
from controlplane.registry import services as registry
from controlplane.registry import sources
from controlplane.registry.drafts import Draft, Source
from controlplane.registry.imports import Limits, Progress
from controlplane.registry.models import Version
from controlplane.rollouts import policies

PROJECT_ROOT = Path(__file__).resolve().parents[4]
SUPERVISORD_CONF = PROJECT_ROOT / "controlplane" / "supervisord.conf"

MODEL = "smollm2-135m-instruct"
ENDPOINT = "smollm2"
ADMIN = "admin"
ACTOR = "make run"
QUANTIZED = (
    "Stored as quantised in the source file. On a CPU with AVX512-VNNI the engine computes on the 4-bit weights; "
    "elsewhere on dequantised weights, which saves disk, not time."
)


class Command(BaseCommand):
    """Prepare the home, and with ``--run`` become the process manager."""

    help = "Make secrets, database, demo model and credentials; with --run start everything."
    # The database may not exist before this command has run.
    requires_system_checks = []
    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        """``--run`` is what `make run` says."""
        parser.add_argument("--run", action="store_true", help="then start all processes")

    def handle(self, *_: Any, run: bool, **__: Any) -> None:
        """Do the steps in order; each prints what it did and how long it took."""
        signal.signal(signal.SIGTERM, _exit_on_sigterm)
        home = Home.of_environment(os.environ)
        steps: list[tuple[str, Callable[[Home], None]]] = [
            ("home and ports", self.open_home),
            ("secrets and Redis", self.configure_redis),
            ("database", self.migrate),
            (f"model {MODEL}", self.import_model),
            ("endpoint and credentials", self.create_demo),
        ]
        try:
            for number, (what, step) in enumerate(steps, start=1):
                self._do(f"[{number}/{len(steps)}] {what}", step, home)
        except (homes.HomeInUse, homes.PortTaken, NoRedisServer) as error:
            raise CommandError(str(error)) from error
        if run:
            self._become_supervisor(home)

    def open_home(self, home: Home) -> None:
        """Hold the home, and make sure that nobody sits on our ports."""
        home.lock()
        ports = {"PORT": settings.GATEWAY_PORT, "CONTROL_PORT": settings.CONTROL_PORT}
        homes.check_ports(_host(), ports)
        _choose_metrics_ports()
        home.logs.mkdir(mode=0o700, exist_ok=True)
        (home.path / "models").mkdir(mode=0o700, exist_ok=True)

    def configure_redis(self, home: Home) -> None:
        """Choose a port and write the configuration, unless REDIS_URL names a server."""
        os.environ.setdefault("TATKAL_EMBEDDED_REDIS", "false")
        os.environ.setdefault("TATKAL_REDIS_SERVER", "none")
        if os.environ["TATKAL_EMBEDDED_REDIS"] != "true":
            return
        os.environ["TATKAL_REDIS_SERVER"] = str(find_server())
        check_not_running(home)
        os.environ["REDIS_URL"] = home.redis_url(must_be_free=True)
        write_config(
            home,
            port=home.redis_port(),
            max_memory=os.environ.get("TATKAL_REDIS_MAXMEMORY") or "1gb",
        )

    def migrate(self, _home: Home) -> None:
        """Bring the database to this release."""
        call_command("migrate", interactive=False, verbosity=0)

    def import_model(self, _home: Home) -> None:
        """The demo model as version 1, imported now; as version 2 quantised, imported by the tasks worker."""
        gguf = _find_weights()
        if _version(1) is None:
            draft = Draft(
                MODEL,
                Source("gguf", str(gguf)),
                description="SmolLM2 135M Instruct in bfloat16.",
            )
            registry.register(draft=draft, actor=ACTOR, now=timezone.now())
        if _version(2) is None:
            draft = Draft(
                MODEL,
                # In bfloat16 the rounding of cache and activations adds up: this small model answers plain
                # questions otherwise.
                Source("gguf", str(gguf), dtype="float32", keep_quantized=True),
                description=QUANTIZED,
            )
            registry.register(draft=draft, actor=ACTOR, now=timezone.now())
        version = Version.objects.named(f"{MODEL}/1").get()
        if not version.is_ready:
            version = self._import(version)
        if not version.is_ready:
            raise CommandError(f"{version.name} could not be imported: {version.state_reason}")

    def create_demo(self, home: Home) -> None:
        """An endpoint, policies to begin with, an admin and credentials, each made once; ``run.json`` tells them."""
        now = timezone.now()
        if not Endpoint.objects.filter(name=ENDPOINT).exists():
            live = Version.objects.named(f"{MODEL}/1").get()
            endpoints.create(name=ENDPOINT, live=live, actor=ACTOR, now=now)
        policies.ensure_presets(now=now)
        # The file is written before the commit: a crash in between leaves credentials that open nothing, which the
        # next start notices and replaces, never rows whose clear text nobody has.
        with transaction.atomic():
            known = home.read_run()
            home.write_run(
                {
                    "gateway_url": f"http://{_address()}:{settings.GATEWAY_PORT}",
                    "control_url": f"http://{_address()}:{settings.CONTROL_PORT}",
                    "api_key": _keep_or_issue(known.get("api_key"), ApiKey.Kind.INFERENCE),
                    "control_token": _keep_or_issue(
                        known.get("control_token"), ApiKey.Kind.CONTROL, role="approver"
                    ),
                    "admin_user": ADMIN,
                    "admin_password": _keep_or_create_admin(known.get("admin_password")),
                    "endpoint": ENDPOINT,
                    "logs": str(home.logs),
                    "supervisor_socket": str(home.supervisor_socket),
                    "metrics_urls": _metrics_urls(),
                }
            )

    def _do(self, what: str, step: Callable[[Home], None], home: Home) -> None:
        started = time.monotonic()
        self.stdout.write(f"{what} ...", ending="")
        self.stdout.flush()
        try:
            step(home)
        except BaseException:
            self.stdout.write(" failed")
            raise
        self.stdout.write(f" done ({time.monotonic() - started:.1f} s)")

    def _import(self, version: Version) -> Version:
        importing = registry.Importing(
            root=settings.ARTIFACT_ROOT,
            limits=Limits(settings.IMPORT_TIMEOUT_S, settings.IMPORT_MEMORY_BYTES),
            on_progress=_Progress(self.stdout.write),
        )
        # Nobody else runs on this home: whatever state an interrupted import left, this one takes over.
        imported = registry.import_version(version=version, importing=importing, clock=timezone.now)
        if imported is None:
            raise CommandError(f"{version.name} is being imported by another process; try again.")
        return imported

    def _become_supervisor(self, home: Home) -> NoReturn:
        os.environ |= {
            "PORT": str(settings.GATEWAY_PORT),
            "CONTROL_PORT": str(settings.CONTROL_PORT),
            "TATKAL_HOST": _host(),
            "TATKAL_HOME": str(home.path),
            "TATKAL_LOGS": str(home.logs),
            "TATKAL_ROOT": str(PROJECT_ROOT),
            "TATKAL_PYTHON": sys.executable,
            "TATKAL_ENGINE_SLOTS": str(settings.ENGINE_SLOTS),
            "TATKAL_SUPERVISOR_SOCKET": str(home.supervisor_socket),
        }
        self.stdout.flush()
        os.set_inheritable(homes.LOCK_FD, True)
        arguments = ["-m", "supervisor.supervisord", "--nodaemon", "-c", str(SUPERVISORD_CONF)]
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 (our own interpreter)


class _Progress:
    """Prints every tenth of the way, once."""

    def __init__(self, write: Callable[..., Any]) -> None:
        self._write = write
        self._tenth = 0

    def __call__(self, progress: Progress) -> None:
        tenth = 10 * progress.done // progress.total if progress.total else 0
        if tenth > self._tenth:
            self._tenth = tenth
            self._write(f" {tenth * 10}%", ending="")


def _find_weights() -> Path:
    """The GGUF file of the package with the demo weights."""
    directory = sources.demo_directory()
    files = sorted(directory.glob("*.gguf")) if directory else []
    if not files:
        raise CommandError(
            f"The package {sources.DEMO_PACKAGE} with the demo weights is not installed; `make run` installs it."
        )
    return files[0]


def _version(number: int) -> Version | None:
    return Version.objects.named(f"{MODEL}/{number}").first()


def _keep_or_issue(known: Any, kind: ApiKey.Kind, *, role: str = "") -> str:
    now = timezone.now()
    try:
        access.find(token=str(known), now=now)
    except access.InvalidToken:
        for key in ApiKey.objects.filter(name=ACTOR, kind=kind).active(now):
            access.revoke(key_id=key.key_id, actor=ACTOR, now=now, reason="its clear text is lost")
        return access.issue(name=ACTOR, kind=kind, role=role, actor=ACTOR, now=now).clear_text
    return str(known)


def _keep_or_create_admin(known: Any) -> str:
    users = get_user_model().objects
    if users.filter(username=ADMIN).exists():
        return str(known or "")
    password = get_random_string(20)
    users.create_superuser(username=ADMIN, email="", password=password)
    return password


def _host() -> str:
    return os.environ.get("TATKAL_HOST") or homes.LOOPBACK


def _choose_metrics_ports() -> None:
    """A port for each slot's ``/metrics``, above that of the control process, unless the environment has decided."""
    if settings.METRICS_PORT is None:
        first = settings.CONTROL_PORT + 1
        found = homes.find_free_ports(homes.LOOPBACK, first, settings.ENGINE_SLOTS)
        os.environ["TATKAL_METRICS_PORT"] = str(found)


def _metrics_urls() -> list[str]:
    """What Prometheus scrapes: gateway, control process, and each slot."""
    first = int(os.environ["TATKAL_METRICS_PORT"])
    host = os.environ.get("TATKAL_METRICS_HOST") or homes.LOOPBACK
    slots = [f"{host}:{first + index}" for index in range(settings.ENGINE_SLOTS if first else 0)]
    web = [f"{_address()}:{port}" for port in (settings.GATEWAY_PORT, settings.CONTROL_PORT)]
    return [f"http://{place}/metrics" for place in (*web, *slots)]


def _address() -> str:
    """Where people on this machine reach a process that may listen everywhere."""
    return homes.LOOPBACK if _host() in ("0.0.0.0", "::") else _host()  # noqa: S104


def _exit_on_sigterm(number: int, _frame: object) -> NoReturn:
    # As an exception, so that a running import ends with us.
    sys.exit(128 + number)
