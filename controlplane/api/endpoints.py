"""Endpoints, with what their slots report."""

from __future__ import annotations

import logging
from typing import Any

from rest_framework import generics, serializers

from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.services import connection, read_slots, readiness
from inference.queue import QueueUnavailable
from inference.replicas import SlotStatus

logger = logging.getLogger(__name__)


class SlotSerializer(serializers.Serializer[SlotStatus]):
    """One engine slot that holds, or is about to hold, a version."""

    slot = serializers.CharField()
    state = serializers.ChoiceField(
        choices=["waiting", "loading", "warming", "ready", "draining", "failed"]
    )
    detail = serializers.CharField()
    fingerprint = serializers.CharField()


class RoleSerializer(serializers.Serializer[Any]):
    """A role of the endpoint and the slots of its version."""

    role = serializers.ChoiceField(choices=["live", "previous", "candidate"])
    version = serializers.CharField()
    is_ready = serializers.BooleanField()
    slots = SlotSerializer(many=True)


class EndpointSerializer(serializers.ModelSerializer[Endpoint]):
    """An endpoint. ``roles`` is null when Redis cannot be asked."""

    live = serializers.CharField(source="live.name")
    previous = serializers.CharField(source="previous.name", default=None)
    candidate = serializers.CharField(source="candidate.name", default=None)
    is_published = serializers.BooleanField()
    roles = serializers.SerializerMethodField()

    class Meta:
        model = Endpoint
        fields = (
            "name",
            "live",
            "previous",
            "candidate",
            "canary_bp",
            "generation",
            "published_generation",
            "is_published",
            "incarnation",
            "queue_cap",
            "deadline_s",
            "store_texts",
            "created_at",
            "updated_at",
            "roles",
        )
        read_only_fields = fields

    def get_roles(self, endpoint: Endpoint) -> RoleSerializer(many=True, allow_null=True):  # type: ignore[valid-type]
        """Readiness of each filled role."""
        slots = self.context["slots"]
        if slots is None:
            return None
        return RoleSerializer(readiness(endpoint=endpoint, slots=slots), many=True).data


class WithSlots(generics.GenericAPIView[Endpoint]):
    """A view that hands its serializer what the slots report."""

    read_role = "viewer"
    serializer_class = EndpointSerializer
    queryset = Endpoint.objects.with_versions()

    def get_serializer_context(self) -> dict[str, Any]:
        """``slots`` is None when Redis is away: the routes are still worth showing."""
        # The schema generator makes views that serve nobody: nothing is to be asked for them.
        is_real = not getattr(self, "swagger_fake_view", False)
        return {**super().get_serializer_context(), "slots": _slots() if is_real else None}


class EndpointList(WithSlots, generics.ListAPIView[Endpoint]):
    """All endpoints."""

    ordering = ("name",)


class EndpointDetail(WithSlots, generics.RetrieveAPIView[Endpoint]):
    """One endpoint."""

    lookup_field = "name"


def _slots() -> list[SlotStatus] | None:
    try:
        return read_slots(queue=connection())
    except QueueUnavailable:
        logger.warning("slots unknown: redis is away")
        return None
