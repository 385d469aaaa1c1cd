"""Models and versions."""

from __future__ import annotations

from django.shortcuts import get_object_or_404
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import generics, serializers

from controlplane.registry.models import Model, Version, VersionQuerySet


class ModelSerializer(serializers.ModelSerializer[Model]):
    """A line of versions."""

    class Meta:
        model = Model
        fields = ("name", "description", "created_at")


class VersionSerializer(serializers.ModelSerializer[Version]):
    """A version, with everything that decides its answers."""

    name = serializers.CharField()
    model = serializers.CharField(source="model.name")

    class Meta:
        model = Version
        fields = (
            "name",
            "model",
            "number",
            "description",
            "state",
            "state_reason",
            "source_kind",
            "source",
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


class ModelList(generics.ListAPIView[Model]):
    """All models."""

    read_role = "viewer"
    ordering = ("name",)
    serializer_class = ModelSerializer
    queryset = Model.objects.all()


class ModelDetail(generics.RetrieveAPIView[Model]):
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
class VersionList(generics.ListAPIView[Version]):
    """Versions, the newest first."""

    read_role = "viewer"
    ordering = ("-id",)
    serializer_class = VersionSerializer
    queryset = Version.objects.select_related("model")

    def get_queryset(self) -> VersionQuerySet:
        """Narrowed by the query parameters."""
        wanted = {
            field: value
            for field, name in (("model__name", "model"), ("state", "state"))
            if (value := self.request.query_params.get(name))
        }
        return VersionQuerySet(Version).select_related("model").filter(**wanted)


class VersionDetail(generics.RetrieveAPIView[Version]):
    """One version, by model and number."""

    read_role = "viewer"
    serializer_class = VersionSerializer
    queryset = Version.objects.select_related("model")

    def get_object(self) -> Version:
        """The version that the address names."""
        return get_object_or_404(
            self.get_queryset(), model__name=self.kwargs["model"], number=self.kwargs["number"]
        )
