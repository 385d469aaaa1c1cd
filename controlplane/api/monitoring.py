"""The request log."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import generics, serializers

from controlplane.api.resources import Resource
from controlplane.monitoring.models import RequestLog, RequestLogQuerySet

LOOKUPS = {"since": "finished_at__gte", "until": "finished_at__lt"}


class RequestLogSerializer(serializers.ModelSerializer[RequestLog]):
    """One finished request: numbers and names. Texts are not part of the API."""

    id = serializers.CharField(source="request_id")

    class Meta:
        model = RequestLog
        fields = (
            "id",
            "key_id",
            "endpoint",
            "version",
            "generation",
            "arm",
            "outcome",
            "status",
            "finish_reason",
            "streamed",
            "prompt_tokens",
            "completion_tokens",
            "cached_tokens",
            "queue_s",
            "first_token_s",
            "total_s",
            "engine_s",
            "finished_at",
            "user",
            "tags",
        )
        read_only_fields = fields


class RequestLogQuery(serializers.Serializer[dict[str, object]]):
    """What the log can be narrowed to."""

    endpoint = serializers.CharField(required=False)
    version = serializers.CharField(required=False)
    outcome = serializers.CharField(required=False)
    since = serializers.DateTimeField(required=False)
    until = serializers.DateTimeField(required=False)


@extend_schema(
    parameters=[
        OpenApiParameter("endpoint", str),
        OpenApiParameter("version", str, description="As model/number."),
        OpenApiParameter("outcome", str, description="ok, cancelled, or the code of the failure."),
        OpenApiParameter("since", str, description="Finished at or after, ISO 8601."),
        OpenApiParameter("until", str, description="Finished before, ISO 8601."),
    ]
)
class RequestLogList(Resource, generics.ListAPIView[RequestLog]):
    """Finished requests, the newest first."""

    read_role = "viewer"
    query = RequestLogQuery
    ordering = ("-id",)
    serializer_class = RequestLogSerializer
    queryset = RequestLog.objects.all()

    def get_queryset(self) -> RequestLogQuerySet:
        """Narrowed by the query parameters; a malformed one is a 400."""
        wanted = {LOOKUPS.get(name, name): value for name, value in self.wanted().items()}
        return RequestLogQuerySet(RequestLog).filter(**wanted)
