"""Endpoints, with what their slots report, and the moves of their routes."""

from __future__ import annotations

import logging
from typing import Any

from django.urls import reverse
from django.utils import timezone
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import generics, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.drf import Body, actor_of
from controlplane.api.idempotency import IDEMPOTENCY_KEY, Idempotent
from controlplane.endpoints import services
from controlplane.endpoints.changes import Changed
from controlplane.endpoints.models import MAX_BP, MAX_DEADLINE_S, MAX_STANDBY_S, Endpoint, Rejection
from controlplane.endpoints.moves import Settings
from controlplane.endpoints.publication import connection
from controlplane.endpoints.routing import ROLES
from controlplane.endpoints.slots import Report, read_report, readiness
from inference.queue import QueueUnavailable
from inference.replicas import SlotState, SlotStatus

logger = logging.getLogger(__name__)

MAX_REASON = 500


class SlotSerializer(serializers.Serializer[SlotStatus]):
    """One engine slot that holds, or is about to hold, a version."""

    slot = serializers.CharField()
    state = serializers.ChoiceField(choices=[state.value for state in SlotState])
    detail = serializers.CharField()
    kernel = serializers.CharField(help_text="What computes its steps, and in which numbers.")
    fingerprint = serializers.CharField()


class RoleSerializer(serializers.Serializer[Any]):
    """A role of the endpoint, the slots of its version, and how many requests wait for them or run on them."""

    role = serializers.ChoiceField(choices=ROLES)
    version = serializers.CharField()
    is_ready = serializers.BooleanField()
    queued = serializers.IntegerField(allow_null=True)
    in_flight = serializers.IntegerField(allow_null=True)
    missing = serializers.CharField(help_text="What it lacks while it is not ready.")
    slots = SlotSerializer(many=True)


class RejectionSerializer(serializers.ModelSerializer[Rejection]):
    """A version that was rolled back here; a promote that names it takes the rejection from it."""

    version = serializers.CharField(source="version.name")

    class Meta:
        model = Rejection
        fields = ("version", "at", "actor", "reason")
        read_only_fields = fields


class EndpointSerializer(serializers.ModelSerializer[Endpoint]):
    """An endpoint. ``roles`` is null when Redis cannot be asked."""

    live = serializers.CharField(source="live.name")
    previous = serializers.CharField(source="previous.name", default=None)
    candidate = serializers.CharField(source="candidate.name", default=None)
    retired = serializers.CharField(source="retired.name", default=None)
    is_published = serializers.BooleanField()
    rejections = RejectionSerializer(many=True)
    roles = serializers.SerializerMethodField()

    class Meta:
        model = Endpoint
        fields = (
            "name",
            "live",
            "previous",
            "candidate",
            "canary_bp",
            "retired",
            "retired_until",
            "rejections",
            "generation",
            "published_generation",
            "is_published",
            "incarnation",
            "queue_cap",
            "deadline_s",
            "store_texts",
            "in_flight",
            "standby_s",
            "created_at",
            "updated_at",
            "roles",
        )
        read_only_fields = fields

    def get_roles(self, endpoint: Endpoint) -> RoleSerializer(many=True, allow_null=True):  # type: ignore[valid-type]
        """Readiness of each filled role."""
        report: Report | None = self.context["report"]
        if report is None:
            return None
        return RoleSerializer(readiness(state=endpoint.to_state(), report=report), many=True).data


class NewEndpoint(Body):
    """An endpoint to be: its name, and the version that answers."""

    name = serializers.CharField(max_length=64)
    live = serializers.CharField(help_text="model/number")
    queue_cap = serializers.IntegerField(required=False, min_value=1)
    deadline_s = serializers.FloatField(required=False, min_value=1, max_value=MAX_DEADLINE_S)
    store_texts = serializers.BooleanField(required=False)
    in_flight = serializers.ChoiceField(required=False, choices=Endpoint.InFlight.choices)
    standby_s = serializers.IntegerField(required=False, min_value=1, max_value=MAX_STANDBY_S)
    reason = serializers.CharField(default="", allow_blank=True, max_length=MAX_REASON)


class EndpointChange(Body):
    """What is sent changes, the rest stays; all of it is one change of one generation."""

    candidate = serializers.CharField(
        required=False,
        allow_null=True,
        help_text="model/number: slots load and warm it, and it gets no traffic; null lets the candidate go.",
    )
    canary_bp = serializers.IntegerField(
        required=False, min_value=0, max_value=MAX_BP, help_text="Share of the candidate in 10,000."
    )
    queue_cap = serializers.IntegerField(required=False, min_value=1)
    deadline_s = serializers.FloatField(required=False, min_value=1, max_value=MAX_DEADLINE_S)
    store_texts = serializers.BooleanField(required=False)
    in_flight = serializers.ChoiceField(required=False, choices=Endpoint.InFlight.choices)
    standby_s = serializers.IntegerField(required=False, min_value=1, max_value=MAX_STANDBY_S)
    reason = serializers.CharField(default="", allow_blank=True, max_length=MAX_REASON)
    expected_generation = serializers.IntegerField(required=False, min_value=1)


class Promotion(Body):
    """Which version goes live, and why."""

    version = serializers.CharField(help_text="model/number")
    reason = serializers.CharField(max_length=MAX_REASON)
    expected_generation = serializers.IntegerField(
        required=False,
        min_value=1,
        help_text="Refuse with 409 and the current state if the endpoint is at another generation.",
    )


class Rollback(Body):
    """Which version is left, where to, and why; nothing at all is the way back from the live version."""

    to = serializers.CharField(
        required=False, help_text="model/number. The previous version, if left out."
    )
    reason = serializers.CharField(default="", allow_blank=True, max_length=MAX_REASON)
    force = serializers.BooleanField(
        default=False, help_text="Go there even if no slot holds the target ready."
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """With ``from``, which is no name for an attribute."""
        leave = serializers.CharField(
            required=False,
            help_text="model/number. The live version, if left out. If it is not live any more, nothing changes, and "
            "the answer is 200.",
        )
        return {"from": leave, **super().get_fields()}


class MoveSerializer(serializers.Serializer[Changed]):
    """What a move did: ``published`` is false while Redis is away, and then the rest follows by itself."""

    generation = serializers.IntegerField(source="state.generation")
    live = serializers.CharField(source="state.live.name")
    previous = serializers.CharField(source="endpoint.previous.name", default=None)
    changed = serializers.BooleanField(
        source="is_changed", help_text="False where the state was already so."
    )
    published = serializers.SerializerMethodField()
    requeued = serializers.IntegerField(
        source="published.requeued",
        default=None,
        help_text="Queued requests moved to the live version.",
    )
    in_flight = serializers.IntegerField(
        source="published.in_flight",
        default=None,
        help_text="Requests that still run on a version without a route.",
    )
    applied_in_ms = serializers.FloatField(
        allow_null=True, help_text="From the start of the call until the route was applied."
    )

    def get_published(self, changed: Changed) -> bool:
        """Whether Redis has the route."""
        return changed.published is not None


class WithSlots(Idempotent, generics.GenericAPIView[Endpoint]):
    """A view that hands its serializer what the slots report."""

    read_role = "viewer"
    write_role = "engineer"
    serializer_class = EndpointSerializer
    queryset = Endpoint.objects.with_versions()

    def get_serializer_context(self) -> dict[str, Any]:
        """``report`` is None when Redis is away: the routes are still worth showing."""
        # The schema generator makes views that serve nobody: nothing is to be asked for them.
        is_real = not getattr(self, "swagger_fake_view", False)
        return {**super().get_serializer_context(), "report": _report() if is_real else None}


class EndpointList(WithSlots, generics.ListAPIView[Endpoint]):
    """All endpoints."""

    ordering = ("name",)

    @extend_schema(
        request=NewEndpoint, parameters=[IDEMPOTENCY_KEY], responses={201: EndpointSerializer}
    )
    def post(self, request: Request) -> Response:
        """Add an endpoint that leads to a version whose artifact is ready."""
        body = _checked(NewEndpoint, request)
        created = services.create_and_publish(
            name=body["name"],
            live=body["live"],
            settings=_settings_in(body),
            reason=body["reason"],
            actor=actor_of(request),
            now=timezone.now(),
            queue=connection(),
        )
        headers = {"Location": reverse("endpoint", args=[created.name])}
        answer = self.get_serializer(created).data
        return Response(answer, status=status.HTTP_201_CREATED, headers=headers)


class EndpointDetail(WithSlots, generics.RetrieveAPIView[Endpoint]):
    """One endpoint."""

    lookup_field = "name"

    @extend_schema(
        request=EndpointChange, parameters=[IDEMPOTENCY_KEY], responses=EndpointSerializer
    )
    def patch(self, request: Request, name: str) -> Response:
        """Change the candidate, its share of the traffic, or settings."""
        body = _checked(EndpointChange, request)
        changed = services.configure(
            name=name,
            candidate=(body["candidate"] or "") if "candidate" in body else None,
            canary_bp=body.get("canary_bp"),
            settings=_settings_in(body),
            reason=body["reason"],
            expected_generation=body.get("expected_generation"),
            actor=actor_of(request),
            now=timezone.now(),
            queue=connection(),
        )
        return Response(self.get_serializer(changed.endpoint).data)


class Promote(Idempotent):
    """Make a version live."""

    write_role = "engineer"

    @extend_schema(request=Promotion, parameters=[IDEMPOTENCY_KEY], responses=MoveSerializer)
    def post(self, request: Request, name: str) -> Response:
        """Send new and queued requests to a version that a slot holds ready.

        The version that was live becomes ``previous``. Refused with 409 ``version_not_resident``, which says what is
        missing, or ``stale_generation``, which tells the current state. Naming the live version changes nothing.
        """
        body = _checked(Promotion, request)
        changed = services.promote(
            name=name,
            version=body["version"],
            reason=body["reason"],
            expected_generation=body.get("expected_generation"),
            actor=actor_of(request),
            now=timezone.now(),
            queue=connection(),
        )
        return Response(MoveSerializer(changed).data)


class RollBack(Idempotent):
    """Take the live version back."""

    write_role = "engineer"

    @extend_schema(
        request=Rollback,
        parameters=[IDEMPOTENCY_KEY],
        responses={
            200: OpenApiResponse(MoveSerializer, description="Done, or done already by another.")
        },
    )
    def post(self, request: Request, name: str) -> Response:
        """Send new and queued requests back to the previous version, at once.

        The version left becomes rejected: nothing leads there again unless somebody names it. A repeat that names
        the version it leaves changes nothing. Refused with 409 only where there is nothing to go back to, or where
        the target could not answer while the live version can.
        """
        body = _checked(Rollback, request)
        changed = services.rollback(
            name=name,
            from_version=body.get("from"),
            to_version=body.get("to"),
            reason=body["reason"],
            force=body["force"],
            actor=actor_of(request),
            now=timezone.now(),
            queue=connection(),
        )
        return Response(MoveSerializer(changed).data)


def _checked(serializer: type[Body], request: Request) -> dict[str, Any]:
    body = serializer(data=request.data)
    body.is_valid(raise_exception=True)
    values: dict[str, Any] = body.validated_data
    return values


def _settings_in(body: dict[str, Any]) -> Settings:
    return Settings(**{name: body.get(name) for name in Settings.__dataclass_fields__})


def _report() -> Report | None:
    try:
        names = Endpoint.objects.values_list("name", flat=True)
        return read_report(queue=connection(), endpoints=list(names))
    except QueueUnavailable:
        logger.warning("slots unknown: redis is away")
        return None
