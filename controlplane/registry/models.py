"""Which models exist, and in which versions. A version that is ready never changes again."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NoReturn, Self

from django.core.validators import RegexValidator, URLValidator
from django.db import models

validate_slug = RegexValidator(
    r"\A[a-z0-9][a-z0-9._-]*\Z",
    "Use lower-case letters, digits, '.', '_' and '-', beginning with a letter or digit.",
)
validate_link = URLValidator(schemes=["http", "https"])


class VersionImmutable(Exception):
    """Somebody tried to change what decides the answers of a ready version; register a new one."""


class Model(models.Model):
    """A line of versions under one name."""

    name = models.CharField(max_length=64, unique=True, validators=[validate_slug])
    description = models.TextField(blank=True)
    created_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=models.Q(name__regex=r"^[a-z0-9][a-z0-9._-]*$"),
                name="registry_model_name",
            )
        ]

    def __str__(self) -> str:
        return self.name


def _beats(silent_since: datetime, begun_before: datetime) -> models.Q:
    """Whether an import was heard of, or, without a heartbeat, is young enough. True or false, never unknown."""
    is_heard = models.Q(heartbeat_at__isnull=False, heartbeat_at__gte=silent_since)
    is_young = models.Q(import_started_at__isnull=False, import_started_at__gte=begun_before)
    return is_heard | (models.Q(heartbeat_at=None) & is_young)


class VersionQuerySet(models.QuerySet["Version"]):
    """Versions by what can be done with them."""

    def ready(self) -> Self:
        """Versions that an engine slot can load."""
        return self.filter(state=Version.State.READY)

    def unsettled(self) -> Self:
        """Versions whose import has not ended."""
        return self.filter(state__in=(Version.State.PENDING, Version.State.IMPORTING))

    def importable(self, *, silent_since: datetime, begun_before: datetime) -> Self:
        """Versions to import now, oldest first: those that wait, and those whose import has died; see ``importing``."""
        died = models.Q(state=Version.State.IMPORTING) & ~_beats(silent_since, begun_before)
        return self.filter(models.Q(state=Version.State.PENDING) | died).order_by("pk")

    def importing(self, *, silent_since: datetime, begun_before: datetime) -> Self:
        """Versions whose import may still be running.

        One that was not heard of after ``silent_since`` has died; one of a release that sends no heartbeat has if it
        began before ``begun_before``.
        """
        return self.filter(_beats(silent_since, begun_before), state=Version.State.IMPORTING)

    def named(self, name: str) -> Self:
        """The version called ``model/number``; nothing when the name is malformed."""
        model, _, number = name.rpartition("/")
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            return self.none()
        return self.filter(model__name=model, number=int(number))


class Version(models.Model):
    """Everything that decides an answer: weights, tokenizer, template, numerics, options, runtime.

    ``dtype`` is what the engine computes in, ``quantization`` how the weights are stored. ``source`` says where
    the artifact is imported from: a path, or the version whose weights it shares, with another ``chat_template`` when
    that names a file. ``runtime`` names interpreter and libraries: an upgrade is a new version. Lineage is ``parent``
    (the version it was made from) and ``run_link`` (the training run). ``import_progress`` is ``{done, total, what}``
    while an import runs, else empty; ``heartbeat_at`` is when its worker was last heard of.
    """

    class State(models.TextChoices):
        PENDING = "pending"
        IMPORTING = "importing"
        READY = "ready"
        FAILED = "failed"

    class SourceKind(models.TextChoices):
        GGUF = "gguf", "GGUF file"
        HUGGINGFACE = "huggingface", "Hugging Face directory"
        ARTIFACT = "artifact", "Weights of another version"

    class Dtype(models.TextChoices):
        FLOAT32 = "float32"
        BFLOAT16 = "bfloat16"
        FLOAT16 = "float16"

    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="versions")
    number = models.PositiveIntegerField()
    description = models.TextField(blank=True)
    notes = models.TextField(blank=True, default="", db_default="")
    parent = models.ForeignKey(
        "self", on_delete=models.PROTECT, related_name="children", null=True, blank=True
    )
    run_link = models.CharField(
        max_length=500, blank=True, default="", db_default="", validators=[validate_link]
    )

    source_kind = models.CharField(max_length=16, choices=SourceKind)
    source = models.CharField(max_length=1024)
    dtype = models.CharField(max_length=16, choices=Dtype, default=Dtype.BFLOAT16)
    keep_quantized = models.BooleanField(default=False)
    engine_options = models.JSONField(default=dict, blank=True)
    chat_template = models.CharField(max_length=1024, blank=True, default="", db_default="")

    artifact = models.CharField(max_length=1024, blank=True)
    quantization = models.CharField(max_length=16, blank=True)
    weights_digest = models.CharField(max_length=71, blank=True)
    tokenizer_digest = models.CharField(max_length=71, blank=True)
    chat_template_digest = models.CharField(max_length=71, blank=True)
    context_length = models.PositiveIntegerField(null=True, blank=True)
    num_parameters = models.PositiveBigIntegerField(null=True, blank=True)
    size_bytes = models.PositiveBigIntegerField(null=True, blank=True)
    generation_defaults = models.JSONField(default=dict, blank=True)
    runtime = models.JSONField(default=dict, blank=True)

    state = models.CharField(max_length=16, choices=State, default=State.PENDING)
    state_reason = models.TextField(blank=True)
    import_progress = models.JSONField(
        default=dict, db_default=models.Value({}, models.JSONField()), blank=True
    )
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=150)
    import_started_at = models.DateTimeField(null=True, blank=True)
    heartbeat_at = models.DateTimeField(null=True, blank=True)
    ready_at = models.DateTimeField(null=True, blank=True)

    objects = VersionQuerySet.as_manager()

    # What people may still write on a ready version.
    MUTABLE_WHEN_READY = frozenset({"description", "notes", "run_link"})

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["model", "number"], name="registry_version_number"),
            models.CheckConstraint(
                condition=~models.Q(state="ready") | ~models.Q(artifact=""),
                name="registry_ready_version_has_artifact",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Write the row, unless it is ready and something that decides its answers differs.

        Raises:
            VersionImmutable: register a new version instead.
        """
        if not self._state.adding and (changed := self._changed_when_ready()):
            raise VersionImmutable(
                f"Version {self.name} is ready; {', '.join(changed)} cannot change. Register a new version."
            )
        super().save(*args, **kwargs)

    def delete(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: request logs and events go on speaking of the version."""
        raise VersionImmutable(f"Version {self.name} cannot be deleted.")

    @property
    def name(self) -> str:
        """``model/number``, as routes, logs and slots call it."""
        return f"{self.model.name}/{self.number}"

    @property
    def is_settled(self) -> bool:
        """Whether its import has ended, either way."""
        return self.state in (self.State.READY, self.State.FAILED)

    @property
    def is_ready(self) -> bool:
        """Whether a slot can load it."""
        return self.state == self.State.READY

    def _changed_when_ready(self) -> list[str]:
        stored = Version.objects.ready().filter(pk=self.pk).first()
        if stored is None:
            return []
        return [
            field.attname
            for field in self._meta.concrete_fields
            if field.attname not in self.MUTABLE_WHEN_READY
            and getattr(stored, field.attname) != getattr(self, field.attname)
        ]
