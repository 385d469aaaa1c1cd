"""The request log."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import generics, serializers

from controlplane.monitoring.models import RequestLog, RequestLogQuerySet


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
            "queue_s",
            "first_token_s",
            "total_s",
            "finished_at",
            "user",
            "tags",
        )
        read_only_fields = fields


class RequestLogFilter(serializers.Serializer[dict[str, object]]):
    """What the log can be narrowed to."""

    endpoint = serializers.CharField(required=False)
    version = serializers.CharField(required=False)
    outcome = serializers.CharField(required=False)
    since = serializers.DateTimeField(required=False)
    until = serializers.DateTimeField(required=False)

    LOOKUPS = {"since": "finished_at__gte", "until": "finished_at__lt"}

    def narrow(self, rows: RequestLogQuerySet) -> RequestLogQuerySet:
        """``rows`` that fit every parameter sent."""
        wanted = {
            self.LOOKUPS.get(name, name): value for name, value in self.validated_data.items()
        }
        return rows.filter(**wanted)


@extend_schema(
    parameters=[
        OpenApiParameter("endpoint", str),
        OpenApiParameter("version", str, description="As model/number."),
        OpenApiParameter("outcome", str, description="ok, cancelled, or the code of the failure."),
        OpenApiParameter("since", str, description="Finished at or after, ISO 8601."),
        OpenApiParameter("until", str, description="Finished before, ISO 8601."),
    ]
)
class RequestLogList(generics.ListAPIView[RequestLog]):
    """Finished requests, the newest first."""

    read_role = "viewer"
    ordering = ("-id",)
    serializer_class = RequestLogSerializer
    queryset = RequestLog.objects.all()

    def get_queryset(self) -> RequestLogQuerySet:
        """Narrowed by the query parameters; a malformed one is a 400."""
        wanted = RequestLogFilter(data=self.request.query_params)
        wanted.is_valid(raise_exception=True)
        return wanted.narrow(RequestLogQuerySet(RequestLog))
