"""Rollouts: start one, move it, and read how far it is and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.urls import reverse
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import generics, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.drf import Body, actor_of, caller_of
from controlplane.api.idempotency import IDEMPOTENCY_KEY, Idempotent
from controlplane.api.rollout_reads import StepSerializer
from controlplane.endpoints.models import MAX_BP
from controlplane.endpoints.publication import connection
from controlplane.rollouts import services
from controlplane.rollouts.machine import State
from controlplane.rollouts.models import Rollout, RolloutQuerySet
from controlplane.rollouts.progress import steps_of, tell_why
from drift.verdict import Verdict

MAX_REASON = 500
STATES = [(state.value, state.name) for state in State]


class RolloutSerializer(serializers.ModelSerializer[Rollout]):
    """A rollout: where it stands, what its gates say, which traffic its candidate has, and who did what when."""

    id = serializers.CharField(source="key")
    endpoint = serializers.CharField(source="endpoint.name")
    incumbent = serializers.CharField(source="incumbent.name")
    candidate = serializers.CharField(source="candidate.name")
    policy = serializers.CharField(help_text="name/version")
    state = serializers.ChoiceField(choices=STATES)
    is_active = serializers.BooleanField()
    hold = serializers.CharField(
        help_text="Why it is paused: manual, step (of the policy) or gate (one that is not critical has failed)."
    )
    verdict = serializers.ChoiceField(choices=[verdict.value for verdict in Verdict])
    step_index = serializers.IntegerField(help_text="-1 until the candidate is ready.")
    version = serializers.IntegerField(help_text="Counts moves; each is one event.")
    notices = serializers.ListField(child=serializers.CharField())
    overrides = serializers.ListField(
        child=serializers.CharField(), help_text="Failed gates that somebody let it go on with."
    )

    class Meta:
        model = Rollout
        fields: tuple[str, ...] = (
            "id",
            "endpoint",
            "incumbent",
            "candidate",
            "policy",
            "state",
            "is_active",
            "hold",
            "verdict",
            "verdict_reason",
            "step_index",
            "canary_bp",
            "shadow_bp",
            "self_bp",
            "score_bp",
            "version",
            "attempt",
            "notices",
            "overrides",
            "is_forced",
            "created_by",
            "reason",
            "approved_by",
            "created_at",
            "state_at",
            "step_at",
            "deadline_at",
            "promoted_at",
            "ended_at",
        )
        read_only_fields = fields


class RolloutDetailSerializer(RolloutSerializer):
    """A rollout with its steps, and the policy as it was frozen at the start."""

    why = serializers.SerializerMethodField()
    steps = serializers.SerializerMethodField()

    class Meta(RolloutSerializer.Meta):
        fields = (*RolloutSerializer.Meta.fields, "why", "steps", "document")
        read_only_fields = fields

    def get_why(self, rollout: Rollout) -> str:
        """In one sentence: what it waits for, or how it ended."""
        return tell_why(rollout)

    @extend_schema_field(StepSerializer(many=True))
    def get_steps(self, rollout: Rollout) -> Any:
        """The time until the candidate is ready, and then each step of the policy."""
        return StepSerializer(steps_of(rollout, timezone.now()), many=True).data


class NewRollout(Body):
    """Which version is to earn its traffic, where, and by which policy."""

    endpoint = serializers.CharField(max_length=64)
    candidate = serializers.CharField(help_text="model/number")
    policy = serializers.CharField(
        help_text="name for its newest version, or name/version. careful, quick and shadow-only are there."
    )
    reason = serializers.CharField(default="", allow_blank=True, max_length=MAX_REASON)
    takes_rejected = serializers.BooleanField(
        default=False,
        help_text="Start a version that was rolled back here before; needs a reason.",
    )


class Reason(Body):
    """Why."""

    reason = serializers.CharField(default="", allow_blank=True, max_length=MAX_REASON)


class TakeBack(Reason):
    """Why, and whether to go back to an incumbent that no slot holds ready."""

    force = serializers.BooleanField(
        default=False, help_text="After the promotion: go back even if the incumbent is not ready."
    )


class Weight(Reason):
    """The share of the candidate, and why."""

    canary_bp = serializers.IntegerField(
        min_value=0,
        max_value=MAX_BP,
        help_text="Of 10,000 requests; at most what the steps reached so far have decided on.",
    )


class RolloutQuery(serializers.Serializer[Any]):
    """What rollouts can be narrowed to."""

    endpoint = serializers.CharField(required=False)
    state = serializers.ChoiceField(required=False, choices=STATES)
    active = serializers.BooleanField(required=False, allow_null=True)


@extend_schema(
    parameters=[
        OpenApiParameter("endpoint", str),
        OpenApiParameter("state", str, enum=[state.value for state in State]),
        OpenApiParameter(
            "active", bool, description="Those that have not ended, or those that have."
        ),
    ]
)
class RolloutList(Idempotent, generics.ListAPIView[Rollout]):
    """Rollouts, the newest first."""

    read_role = "viewer"
    write_role = "engineer"
    query = RolloutQuery
    ordering = ("-id",)
    serializer_class = RolloutSerializer
    queryset = Rollout.objects.with_names()

    @extend_schema(
        request=NewRollout, parameters=[IDEMPOTENCY_KEY], responses={201: RolloutDetailSerializer}
    )
    def post(self, request: Request) -> Response:
        """Make a version the candidate of an endpoint, under a policy; slots load it, and the gates do the rest.

        Refused with 409 ``rollout_active``, ``version_rejected``, ``does_not_fit``, ``held_by_rollout`` or
        ``candidate_is_live``.
        """
        body = NewRollout(data=request.data)
        body.is_valid(raise_exception=True)
        rollout = services.start(
            **body.validated_data,
            actor=actor_of(request),
            now=timezone.now(),
            queue=connection(),
        )
        return _created(rollout)

    def get_queryset(self) -> RolloutQuerySet:
        """Narrowed by the query parameters."""
        wanted = self.wanted()
        rollouts = RolloutQuerySet(Rollout).with_names()
        is_active = wanted.pop("active", None)
        if is_active is not None:
            active = RolloutQuerySet(Rollout).active().values("pk")
            rollouts = (
                rollouts.filter(pk__in=active) if is_active else rollouts.exclude(pk__in=active)
            )
        lookups = {"endpoint": "endpoint__name"}
        return rollouts.filter(**{lookups.get(name, name): value for name, value in wanted.items()})


class RolloutDetail(Idempotent):
    """One rollout."""

    read_role = "viewer"

    @extend_schema(responses=RolloutDetailSerializer)
    def get(self, request: Request, rollout: str) -> Response:  # noqa: ARG002 (the framework's signature)
        """With its steps: what each has brought, and how long it is expected to take."""
        return _shown(services.find(rollout))


class RolloutAction(Idempotent):
    """Something that is done to a rollout; a repeat of an abort or a rollback changes nothing."""

    write_role = "engineer"
    body: type[Body] = Reason

    def checked(self, request: Request, rollout: str) -> dict[str, Any]:
        """What every service takes, and the fields of the body."""
        body = self.body(data=request.data)
        body.is_valid(raise_exception=True)
        return {
            **body.validated_data,
            "key": rollout,
            "actor": actor_of(request),
            "now": timezone.now(),
            "queue": connection(),
        }


def _describe(
    body: type[Body] = Reason, status_code: int = 200
) -> Callable[[Callable[..., Response]], Callable[..., Response]]:
    """What the schema says of an action."""
    return extend_schema(
        request=body, parameters=[IDEMPOTENCY_KEY], responses={status_code: RolloutDetailSerializer}
    )


class Pause(RolloutAction):
    """Hold it."""

    @_describe()
    def post(self, request: Request, rollout: str) -> Response:
        """Hold the rollout where it is, with its traffic; gates and deadlines go on."""
        return _shown(services.pause(**self.checked(request, rollout)))


class Resume(RolloutAction):
    """Let it go on."""

    @_describe()
    def post(self, request: Request, rollout: str) -> Response:
        """Let a paused rollout go on. Past a failed gate it needs a reason, and that gate still forbids a pass."""
        return _shown(services.resume(**self.checked(request, rollout)))


class Approve(RolloutAction):
    """Let it go on that waits for an approval."""

    @_describe()
    def post(self, request: Request, rollout: str) -> Response:
        """Approve; refused with 403 ``not_allowed`` for the author, and for whoever is no approver."""
        role = caller_of(request).role
        return _shown(services.approve(role=role, **self.checked(request, rollout)))


class PromoteRollout(RolloutAction):
    """Make the candidate live before its steps are done."""

    @_describe()
    def post(self, request: Request, rollout: str) -> Response:
        """Promote at once where every gate has passed and no approval is to come.

        Else it is forced: by an approver who is not the author, with a reason.
        """
        role = caller_of(request).role
        return _shown(services.promote(role=role, **self.checked(request, rollout)))


class Abort(RolloutAction):
    """End it."""

    @_describe()
    def post(self, request: Request, rollout: str) -> Response:
        """End the rollout; the incumbent answers, and the candidate is not rejected. May be repeated."""
        return _shown(services.abort(**self.checked(request, rollout)))


class RollBackRollout(RolloutAction):
    """Take the candidate back."""

    body = TakeBack

    @_describe(TakeBack)
    def post(self, request: Request, rollout: str) -> Response:
        """Take the candidate back in any state, also after the promotion, and reject it. May be repeated.

        Needs no approval, and works with Redis away.
        """
        return _shown(services.rollback(**self.checked(request, rollout)))


class Retry(RolloutAction):
    """Start again what has ended."""

    @_describe(status_code=201)
    def post(self, request: Request, rollout: str) -> Response:
        """A new rollout of the same version under the newest version of its policy; nothing counted is taken over.

        A version that was rejected needs a reason.
        """
        return _created(services.retry(**self.checked(request, rollout)))


class SetWeight(RolloutAction):
    """Give the candidate another share."""

    body = Weight

    @_describe(Weight)
    def post(self, request: Request, rollout: str) -> Response:
        """Give the candidate any share up to the largest that the steps reached so far have decided on."""
        return _shown(services.set_weight(**self.checked(request, rollout)))


def _shown(rollout: Rollout) -> Response:
    return Response(RolloutDetailSerializer(rollout).data)


def _created(rollout: Rollout) -> Response:
    headers = {"Location": reverse("rollout", args=[rollout.key])}
    answer = RolloutDetailSerializer(rollout).data
    return Response(answer, status=status.HTTP_201_CREATED, headers=headers)
