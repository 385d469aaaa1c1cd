"""API keys, without their secrets."""

from __future__ import annotations

from django.utils import timezone
from drf_spectacular.utils import extend_schema_field
from rest_framework import generics, serializers

from controlplane.access.models import ApiKey
from controlplane.api.resources import Resource


class KeySerializer(serializers.ModelSerializer[ApiKey]):
    """A key as it can be recognised: its id and its last four characters."""

    id = serializers.CharField(source="key_id")
    endpoints = serializers.ListField(
        child=serializers.CharField(),
        help_text="What an application's key opens; all of them where none is named.",
    )
    state = serializers.SerializerMethodField()

    class Meta:
        model = ApiKey
        fields = (
            "id",
            "name",
            "kind",
            "role",
            "endpoints",
            "last4",
            "state",
            "created_at",
            "created_by",
            "expires_at",
            "revoked_at",
        )
        read_only_fields = fields

    @extend_schema_field(serializers.ChoiceField(choices=["active", "expired", "revoked"]))
    def get_state(self, key: ApiKey) -> str:
        """Whether it opens anything now."""
        return key.state_at(timezone.now())


class KeyList(Resource, generics.ListAPIView[ApiKey]):
    """Keys of applications and of engineers, the newest first."""

    read_role = "viewer"
    ordering = ("-id",)
    serializer_class = KeySerializer
    queryset = ApiKey.objects.all()
