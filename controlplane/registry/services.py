"""Registering versions, and turning their sources into artifacts."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import cache
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import Max

from controlplane.errors import DomainError
from controlplane.events.services import record
from controlplane.registry import imports, sources
from controlplane.registry.drafts import RUNTIME_PACKAGES, Checked, Draft, check
from controlplane.registry.models import Model, Version, VersionQuerySet

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0
# A worker that imports says so every few seconds (imports.BEAT_S); one that was silent for so long is dead.
SILENT_S = 60.0


class InvalidModel(DomainError):
    """A model cannot be as described."""

    code = "invalid_model"
    status = HTTPStatus.BAD_REQUEST


class ModelExists(DomainError):
    """The name is taken."""

    code = "model_exists"
    status = HTTPStatus.CONFLICT


@dataclass(frozen=True, slots=True)
class Importing:
    """How imports run: where artifacts go, what a child may use, who hears of progress."""

    root: Path
    limits: imports.Limits = field(default_factory=imports.Limits)
    on_progress: Callable[[imports.Progress], None] = lambda _: None


@transaction.atomic
def create_model(*, name: str, description: str, actor: str, now: datetime) -> Model:
    """Add a model that has no versions yet.

    Raises:
        InvalidModel: the name cannot be one.
        ModelExists: the name is taken.
    """
    model = Model(name=name, description=description, created_at=now)
    try:
        model.clean_fields()
    except ValidationError as error:
        raise InvalidModel(f"Model name {name!r}: {'; '.join(error.messages)}") from error
    try:
        with transaction.atomic():
            model.save(force_insert=True)
    except IntegrityError as error:
        raise ModelExists(
            f"Model {name!r} exists already; register a version of it, or choose another name."
        ) from error
    record(type="model.created", subject=f"model:{name}", actor=actor, now=now)
    return model


def check_draft(draft: Draft) -> Checked:
    """What ``register`` would find wrong, without registering.

    Raises:
        InvalidVersion: something cannot work; it names the field.
    """
    return check(draft, sources.allowed_roots(settings.MODEL_ROOTS), settings.RUNTIME_ROOTS)


@transaction.atomic
def register(*, draft: Draft, actor: str, now: datetime) -> Version:
    """Add the next version of the draft's model, to be imported; the model is made when it is new.

    Raises:
        InvalidVersion: something cannot work; it names the field.
    """
    checked = check_draft(draft)
    owner, is_new = Model.objects.get_or_create(name=draft.model, defaults={"created_at": now})
    if is_new:
        record(type="model.created", subject=f"model:{owner.name}", actor=actor, now=now)
    # The lock on the model row makes the next number ours until commit.
    owner = Model.objects.select_for_update().get(pk=owner.pk)
    highest = owner.versions.aggregate(highest=Max("number"))["highest"] or 0
    version = Version.objects.create(
        model=owner,
        number=highest + 1,
        description=draft.description,
        notes=draft.notes,
        parent=checked.parent,
        run_link=draft.run_link,
        source_kind=draft.source.kind,
        source=checked.location,
        dtype=draft.source.dtype,
        keep_quantized=draft.source.keep_quantized,
        chat_template=checked.chat_template,
        engine_options=dict(draft.engine_options),
        runtime=dict(checked.runtime),
        created_at=now,
        created_by=actor,
    )
    data = {
        "source_kind": version.source_kind,
        "source": version.source,
        "parent": checked.parent.name if checked.parent else None,
    }
    _record("version.registered", version, actor=actor, now=now, data=data)
    return version


def import_pending(*, importing: Importing, clock: Callable[[], datetime]) -> Version | None:
    """Import the oldest version that waits; None when none does, or while another import runs.

    An import may take half an hour of one thread, and the others have routes and keys to see to. One whose worker
    died is taken over when it was silent for ``SILENT_S``.
    """
    now = clock()
    alive = {
        "silent_since": now - timedelta(seconds=SILENT_S),
        "begun_before": now - timedelta(seconds=importing.limits.timeout_s + SILENT_S),
    }
    version = Version.objects.importable(**alive).first()
    # In this order two importers find the same version, which one of them takes, or the later sees the earlier run.
    if version is None or Version.objects.importing(**alive).exists():
        return None
    return import_version(version=version, importing=importing, clock=clock)


def import_version(
    *, version: Version, importing: Importing, clock: Callable[[], datetime]
) -> Version | None:
    """Turn the source of ``version`` into an artifact: it is READY or FAILED afterwards.

    None when another process took it first, or took it over because this one was silent for too long: then nothing
    that was found here counts. An import that was told to stop leaves the version PENDING.
    """
    held = _take(version, clock)
    if held is None:
        return None

    def on_progress(progress: imports.Progress) -> None:
        importing.on_progress(progress)
        held.show(progress)

    try:
        report = imports.run_import(
            _arguments(version, importing.root),
            limits=importing.limits,
            on_progress=on_progress,
            on_beat=held.beat,
        )
    except imports.ImportFailed as failure:
        return _end_without_artifact(held, failure, now=clock())
    except TakenOver:
        logger.warning("import was taken over version=%s", version.name)
        return None
    return _end_ready(held, report, now=clock())


class TakenOver(Exception):
    """Another worker imports the version now, because this one was not heard of for too long."""


class _Held:
    """An import that is ours as long as its row says so: tells that its worker lives, and how far it is."""

    def __init__(self, pk: int, started_at: datetime, clock: Callable[[], datetime]) -> None:
        self._pk = pk
        self._started_at = started_at
        self._clock = clock
        self._shown_at = time.monotonic() - PROGRESS_INTERVAL_S

    def rows(self) -> VersionQuerySet:
        """The row, or none when the import is not ours any more."""
        return VersionQuerySet(Version).filter(
            pk=self._pk, state=Version.State.IMPORTING, import_started_at=self._started_at
        )

    def beat(self) -> None:
        """Tell that the worker lives.

        Raises:
            TakenOver: the import is not ours any more.
        """
        try:
            is_ours = self.rows().update(heartbeat_at=self._clock())
        except DatabaseError:
            # A database that is away hears of nobody; the import itself goes on.
            logger.warning("import heartbeat not written", exc_info=True)
            return
        if not is_ours:
            raise TakenOver

    def show(self, progress: imports.Progress) -> None:
        """Write how far it is, at most once a second."""
        if time.monotonic() < self._shown_at + PROGRESS_INTERVAL_S:
            return
        self._shown_at = time.monotonic()
        try:
            self.rows().update(import_progress=asdict(progress))
        except DatabaseError:
            # People see an older number; the import itself goes on.
            logger.warning("import progress not written", exc_info=True)

    def lock(self) -> Version | None:
        """The row, locked in the caller's transaction, if it is still ours."""
        # Locked alone: see the lock of an endpoint. The model is read afterwards.
        return self.rows().select_for_update().first()


def _take(version: Version, clock: Callable[[], datetime]) -> _Held | None:
    """Make the import ours, unless the row is not as it was when it was chosen: a heartbeat in between keeps it."""
    started_at = clock()
    taken = Version.objects.filter(
        pk=version.pk,
        state=version.state,
        import_started_at=version.import_started_at,
        heartbeat_at=version.heartbeat_at,
    ).update(
        state=Version.State.IMPORTING,
        import_started_at=started_at,
        heartbeat_at=started_at,
        state_reason="",
        import_progress={},
    )
    return _Held(version.pk, started_at, clock) if taken else None


def _arguments(version: Version, root: Path) -> list[str]:
    """The importer's arguments. Paths are looked up again: what they lead to may have changed since registration."""
    roots = sources.allowed_roots(settings.MODEL_ROOTS)
    try:
        source = _locate(version, roots)
        template = version.chat_template and str(sources.find_file(version.chat_template, roots))
    except sources.SourceRefused as error:
        raise imports.ImportFailed("source_refused", str(error)) from error
    arguments = [version.source_kind, source, "--root", str(root)]
    if version.source_kind == Version.SourceKind.ARTIFACT:
        return arguments + (["--chat-template", template] if template else [])
    return arguments + (
        ["--keep-quantized"] if version.keep_quantized else ["--dtype", version.dtype]
    )


def _locate(version: Version, roots: tuple[Path, ...]) -> str:
    if version.source_kind == Version.SourceKind.ARTIFACT:
        return Version.objects.ready().named(version.source).get().artifact
    if version.source_kind == Version.SourceKind.GGUF:
        return str(sources.find_file(version.source, roots))
    return str(sources.find_directory(version.source, roots))


@transaction.atomic
def _end_ready(held: _Held, report: imports.ImportReport, *, now: datetime) -> Version | None:
    row = held.lock()
    if row is None:
        return None
    manifest = report.manifest
    row.artifact = str(report.artifact)
    row.quantization = manifest["quantization"]
    row.weights_digest = manifest["weights_digest"]
    row.tokenizer_digest = manifest["tokenizer_digest"]
    row.chat_template_digest = manifest["chat_template_digest"]
    row.context_length = manifest["model"]["context_length"]
    row.num_parameters = manifest["num_parameters"]
    row.size_bytes = manifest["size_bytes"]
    row.generation_defaults = manifest["generation_defaults"]
    row.runtime = current_runtime() | row.runtime
    row.import_progress, row.heartbeat_at = {}, None
    row.state, row.state_reason, row.ready_at = Version.State.READY, "", now
    row.save()
    _record(
        "version.ready", row, actor="importer", now=now, data={"weights_digest": row.weights_digest}
    )
    return row


@transaction.atomic
def _end_without_artifact(
    held: _Held, failure: imports.ImportFailed, *, now: datetime
) -> Version | None:
    row = held.lock()
    if row is None:
        return None
    row.state = Version.State.PENDING if failure.may_retry else Version.State.FAILED
    row.state_reason = f"{failure.code}: {failure.message}"
    row.import_progress, row.heartbeat_at = {}, None
    row.save()
    if not failure.may_retry:
        _record("version.failed", row, actor="importer", now=now, data={"code": failure.code})
    return row


@cache
def current_runtime() -> dict[str, str]:
    """Interpreter and library releases of this machine, as a version records them."""
    runtime = {"python": platform.python_version(), "machine": platform.machine()}
    for package in RUNTIME_PACKAGES:
        try:
            runtime[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            runtime[package] = "absent"
    return runtime


def _record(
    type: str, version: Version, *, actor: str, now: datetime, data: Mapping[str, Any]
) -> None:
    record(type=type, subject=f"version:{version.name}", actor=actor, now=now, data=data)
