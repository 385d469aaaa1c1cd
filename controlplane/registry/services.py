"""Registering versions, and turning their sources into artifacts."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Max

from controlplane.errors import DomainError
from controlplane.events.services import record
from controlplane.registry import imports
from controlplane.registry.models import Model, Version, validate_slug
from inference.config import EngineConfig, InvalidConfig

# The libraries whose release can change a token.
RUNTIME_PACKAGES = ("tatkal", "torch", "numpy", "tokenizers", "safetensors", "jinja2")


class InvalidVersion(DomainError):
    """A version cannot be registered as described."""

    code = "invalid_version"
    status = HTTPStatus.BAD_REQUEST


@dataclass(frozen=True, slots=True)
class Source:
    """Where a version's weights come from, and how they are taken over.

    ``kind`` is ``gguf`` (a file) or ``huggingface`` (a directory). ``keep_quantized`` stores the weights as they are
    quantised in the source; otherwise they are stored in ``dtype``.
    """

    kind: str
    path: Path
    dtype: str = "bfloat16"
    keep_quantized: bool = False


@dataclass(frozen=True, slots=True)
class Importing:
    """How imports run: where artifacts go, what a child may use, who hears of progress."""

    root: Path
    limits: imports.Limits = field(default_factory=imports.Limits)
    on_progress: Callable[[imports.Progress], None] = lambda _: None


@transaction.atomic
def register(
    *,
    model: str,
    source: Source,
    actor: str,
    now: datetime,
    description: str = "",
    engine_options: Mapping[str, Any] | None = None,
) -> Version:
    """Add the next version of ``model``, to be imported; the model is made when it is new.

    Raises:
        InvalidVersion: the name, the source or an engine option cannot work.
    """
    options = dict(engine_options or {})
    _check(model, source, options)
    owner, _ = Model.objects.get_or_create(name=model, defaults={"created_at": now})
    # The lock on the model row makes the next number ours until commit.
    owner = Model.objects.select_for_update().get(pk=owner.pk)
    highest = owner.versions.aggregate(highest=Max("number"))["highest"] or 0
    version = Version.objects.create(
        model=owner,
        number=highest + 1,
        description=description,
        source_kind=source.kind,
        source=str(source.path),
        dtype=source.dtype,
        keep_quantized=source.keep_quantized,
        engine_options=options,
        created_at=now,
        created_by=actor,
    )
    _record("version.registered", version, actor=actor, now=now, data={"source": version.source})
    return version


def import_pending(*, importing: Importing, clock: Callable[[], datetime]) -> Version | None:
    """Import the oldest version that waits; None when none does.

    A version whose import died with its process is taken again once no import could still be running.
    """
    stale_before = clock() - timedelta(seconds=importing.limits.timeout_s + 60)
    version = Version.objects.importable(stale_before=stale_before).first()
    if version is None:
        return None
    return import_version(version=version, importing=importing, clock=clock)


def import_version(
    *, version: Version, importing: Importing, clock: Callable[[], datetime]
) -> Version | None:
    """Turn the source of ``version`` into an artifact: it is READY or FAILED afterwards.

    None when another process took it first. An import that was told to stop leaves the version PENDING.
    """
    taken = Version.objects.filter(
        pk=version.pk, state=version.state, import_started_at=version.import_started_at
    ).update(state=Version.State.IMPORTING, import_started_at=clock())
    if not taken:
        return None
    try:
        report = imports.run_import(
            _arguments(version, importing.root),
            limits=importing.limits,
            on_progress=importing.on_progress,
        )
    except imports.ImportFailed as failure:
        return _end_without_artifact(version, failure, now=clock())
    return _end_ready(version, report, now=clock())


def _check(model: str, source: Source, options: Mapping[str, Any]) -> None:
    try:
        validate_slug(model)
    except ValidationError as error:
        raise InvalidVersion(f"Model name {model!r}: {error.messages[0]}") from error
    if source.kind not in Version.SourceKind.values:
        raise InvalidVersion(
            f"Source kind {source.kind!r} must be one of {', '.join(Version.SourceKind.values)}."
        )
    if not source.path.is_absolute():
        raise InvalidVersion(f"Source path {str(source.path)!r} must be absolute.")
    try:
        EngineConfig(artifact=Path("/"), dtype=source.dtype).with_options(options)
    except (InvalidConfig, TypeError) as error:
        raise InvalidVersion(f"Engine options cannot work: {error}") from error


def _arguments(version: Version, root: Path) -> list[str]:
    weights = ["--keep-quantized"] if version.keep_quantized else ["--dtype", version.dtype]
    return [version.source_kind, version.source, "--root", str(root), *weights]


@transaction.atomic
def _end_ready(version: Version, report: imports.ImportReport, *, now: datetime) -> Version:
    row = Version.objects.select_for_update().select_related("model").get(pk=version.pk)
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
    row.runtime = current_runtime()
    row.state, row.state_reason, row.ready_at = Version.State.READY, "", now
    row.save()
    _record(
        "version.ready", row, actor="importer", now=now, data={"weights_digest": row.weights_digest}
    )
    return row


@transaction.atomic
def _end_without_artifact(
    version: Version, failure: imports.ImportFailed, *, now: datetime
) -> Version:
    row = Version.objects.select_for_update().select_related("model").get(pk=version.pk)
    row.state = Version.State.PENDING if failure.may_retry else Version.State.FAILED
    row.state_reason = f"{failure.code}: {failure.message}"
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
