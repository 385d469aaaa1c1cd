"""Models and versions: read, and registered."""

from __future__ import annotations

import logging
from typing import Any

from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import generics, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.drf import Body, actor_of
from controlplane.api.idempotency import IDEMPOTENCY_KEY, Idempotent
from controlplane.api.resources import Resource
from controlplane.api.times import to_iso
from controlplane.endpoints.publication import connection
from controlplane.endpoints.slots import read_failures
from controlplane.registry import services
from controlplane.registry.drafts import Draft, Source
from controlplane.registry.models import Model, Version, VersionQuerySet
from inference.queue import QueueUnavailable
from inference.replicas import LoadFailure

logger = logging.getLogger(__name__)


class ModelSerializer(serializers.ModelSerializer[Model]):
    """A line of versions."""

    class Meta:
        model = Model
        fields = ("name", "description", "created_at")


class NewModel(Body):
    """A model to be."""

    name = serializers.CharField(max_length=64)
    description = serializers.CharField(required=False, allow_blank=True, default="")


class ProgressSerializer(serializers.Serializer[Any]):
    """How far an import is; ``total`` 0: not known."""

    done = serializers.IntegerField()
    total = serializers.IntegerField()
    what = serializers.CharField()


class LoadFailureSerializer(serializers.Serializer[Any]):
    """How loading a version fails. It is tried again until it is loaded, or no endpoint wants it any more."""

    endpoint = serializers.CharField()
    slot = serializers.CharField(help_text="Which tried last.")
    reason = serializers.CharField(source="detail")
    tries = serializers.IntegerField(source="count")
    failed_at = serializers.SerializerMethodField()
    retry_at = serializers.SerializerMethodField()

    def get_failed_at(self, failure: LoadFailure) -> serializers.DateTimeField(allow_null=True):  # type: ignore[valid-type]
        """When, by the clock of Redis."""
        return to_iso(failure.failed_at)

    def get_retry_at(self, failure: LoadFailure) -> serializers.DateTimeField(allow_null=True):  # type: ignore[valid-type]
        """When the next try may begin."""
        return to_iso(failure.retry_at)


class VersionSerializer(serializers.ModelSerializer[Version]):
    """A version, with everything that decides its answers. ``load_failures`` is null when Redis cannot be asked."""

    name = serializers.CharField()
    model = serializers.CharField(source="model.name")
    # Declared fields are taken out of the class, so that these names shadow nothing of the framework.
    parent = serializers.CharField(source="parent.name", default=None)  # type: ignore[assignment]
    import_progress = serializers.SerializerMethodField()
    load_failures = serializers.SerializerMethodField()

    class Meta:
        model = Version
        fields = (
            "name",
            "model",
            "number",
            "description",
            "notes",
            "parent",
            "run_link",
            "state",
            "state_reason",
            "import_progress",
            "load_failures",
            "source_kind",
            "source",
            "chat_template",
            "keep_quantized",
            "dtype",
            "quantization",
            "engine_options",
            "generation_defaults",
            "context_length",
            "num_parameters",
            "size_bytes",
            "weights_digest",
            "tokenizer_digest",
            "chat_template_digest",
            "runtime",
            "created_at",
            "created_by",
            "ready_at",
        )
        read_only_fields = fields

    def get_import_progress(self, version: Version) -> ProgressSerializer(allow_null=True):  # type: ignore[valid-type]
        """Null while no import runs."""
        return version.import_progress or None

    @extend_schema_field(LoadFailureSerializer(many=True, allow_null=True))
    def get_load_failures(self, version: Version) -> Any:
        """Empty while nothing is wrong, or nobody wants it loaded."""
        failures: list[LoadFailure] | None = self.context["failures"]
        if failures is None:
            return None
        found = [failure for failure in failures if failure.version == version.name]
        return LoadFailureSerializer(found, many=True).data


class WithFailures(generics.GenericAPIView[Version]):
    """A view that hands its serializer what slots could not load."""

    def get_serializer_context(self) -> dict[str, Any]:
        """With one look at Redis for all versions of the answer."""
        is_real = not getattr(self, "swagger_fake_view", False)
        return {**super().get_serializer_context(), "failures": _failures() if is_real else None}


class NewVersion(Body):
    """A version to be, under a model that the address names; everything but the source may be left out."""

    source_kind = serializers.ChoiceField(choices=Version.SourceKind.choices)
    source = serializers.CharField(max_length=1024)  # type: ignore[assignment]
    dtype = serializers.ChoiceField(choices=Version.Dtype.choices, default=Version.Dtype.BFLOAT16)
    keep_quantized = serializers.BooleanField(default=False)
    chat_template = serializers.CharField(max_length=1024, allow_blank=True, default="")
    engine_options = serializers.DictField(default=dict)
    runtime = serializers.DictField(child=serializers.CharField(), default=dict)
    description = serializers.CharField(allow_blank=True, default="")
    notes = serializers.CharField(allow_blank=True, default="")
    parent = serializers.CharField(  # type: ignore[assignment]
        allow_blank=True, default="", help_text="model/number"
    )
    run_link = serializers.CharField(allow_blank=True, default="")


class NewVersionOfModel(NewVersion):
    """A version to be, with the name of its model, which is made when it is new."""

    model = serializers.CharField(max_length=64)


class VersionQuery(serializers.Serializer[Any]):
    """What versions can be narrowed to."""

    model = serializers.CharField(required=False)
    state = serializers.ChoiceField(required=False, choices=Version.State.choices)


class ModelList(Idempotent, generics.ListAPIView[Model]):
    """All models."""

    read_role = "viewer"
    write_role = "engineer"
    ordering = ("name",)
    serializer_class = ModelSerializer
    queryset = Model.objects.all()

    @extend_schema(request=NewModel, parameters=[IDEMPOTENCY_KEY], responses={201: ModelSerializer})
    def post(self, request: Request) -> Response:
        """Add a model without versions."""
        body = NewModel(data=request.data)
        body.is_valid(raise_exception=True)
        model = services.create_model(
            **body.validated_data, actor=actor_of(request), now=timezone.now()
        )
        return _created(ModelSerializer(model).data, reverse("model", args=[model.name]))


class ModelDetail(Resource, generics.RetrieveAPIView[Model]):
    """One model."""

    read_role = "viewer"
    serializer_class = ModelSerializer
    queryset = Model.objects.all()
    lookup_field = "name"


@extend_schema(
    parameters=[
        OpenApiParameter("model", str, description="Only versions of this model."),
        OpenApiParameter("state", str, enum=list(Version.State.values)),
    ]
)
class VersionList(Idempotent, WithFailures, generics.ListAPIView[Version]):
    """Versions, the newest first."""

    read_role = "viewer"
    write_role = "engineer"
    query = VersionQuery
    ordering = ("-id",)
    serializer_class = VersionSerializer
    queryset = Version.objects.select_related("model", "parent__model")

    @extend_schema(
        request=NewVersionOfModel, parameters=[IDEMPOTENCY_KEY], responses={201: VersionSerializer}
    )
    def post(self, request: Request) -> Response:
        """Register a version; follow ``Location`` until its state is ready or failed."""
        body = NewVersionOfModel(data=request.data)
        body.is_valid(raise_exception=True)
        return _register(request, **body.validated_data)

    def get_queryset(self) -> VersionQuerySet:
        """Narrowed by the query parameters."""
        lookups = {"model": "model__name"}
        wanted = {lookups.get(name, name): value for name, value in self.wanted().items()}
        return VersionQuerySet(Version).select_related("model", "parent__model").filter(**wanted)


class VersionsOfModel(VersionList):
    """Versions of one model, the newest first."""

    @extend_schema(
        request=NewVersion, parameters=[IDEMPOTENCY_KEY], responses={201: VersionSerializer}
    )
    def post(self, request: Request, name: str) -> Response:  # type: ignore[override]
        """Register a version of this model, which is made when it is new."""
        body = NewVersion(data=request.data)
        body.is_valid(raise_exception=True)
        return _register(request, model=name, **body.validated_data)

    def get_queryset(self) -> VersionQuerySet:
        """Those of the model that the address names."""
        model = get_object_or_404(Model, name=self.kwargs["name"])
        return super().get_queryset().filter(model=model)


class VersionDetail(Resource, WithFailures, generics.RetrieveAPIView[Version]):
    """One version, by model and number."""

    read_role = "viewer"
    serializer_class = VersionSerializer
    queryset = Version.objects.select_related("model", "parent__model")

    def get_object(self) -> Version:
        """The version that the address names."""
        return get_object_or_404(
            self.get_queryset(), model__name=self.kwargs["model"], number=self.kwargs["number"]
        )


def _register(request: Request, **fields: Any) -> Response:
    source = Source(
        kind=fields.pop("source_kind"),
        location=fields.pop("source"),
        dtype=fields.pop("dtype"),
        keep_quantized=fields.pop("keep_quantized"),
        chat_template=fields.pop("chat_template"),
    )
    version = services.register(
        draft=Draft(source=source, **fields), actor=actor_of(request), now=timezone.now()
    )
    address = reverse("version", args=[version.model.name, version.number])
    # What is not imported yet, no slot has tried.
    return _created(VersionSerializer(version, context={"failures": []}).data, address)


def _failures() -> list[LoadFailure] | None:
    try:
        return read_failures(queue=connection())
    except QueueUnavailable:
        logger.warning("load failures unknown: redis is away")
        return None


def _created(data: Any, address: str) -> Response:
    return Response(data, status=status.HTTP_201_CREATED, headers={"Location": address})
