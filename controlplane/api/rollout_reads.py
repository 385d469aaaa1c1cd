"""What a rollout has shown so far: its steps, its gates by segment, its pairs, and what happened to it."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import generics, serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.resources import Resource
from controlplane.endpoints.publication import connection
from controlplane.rollouts import services
from controlplane.rollouts.copies import ARMS, copies_of
from controlplane.rollouts.gate_rows import gates_of
from controlplane.rollouts.pairs import Pair, PairQuerySet
from controlplane.rollouts.progress import Phase
from controlplane.rollouts.timeline import timeline_of
from drift.verdict import Verdict

VERDICTS = [verdict.value for verdict in Verdict]


class ExpectedSerializer(serializers.Serializer[Any]):
    """How long a step takes for an equal candidate, on the traffic of the start; null where nobody can tell."""

    hours = serializers.FloatField(allow_null=True)
    is_least = serializers.BooleanField(
        help_text="It waits for something else as well, of which nobody knows how long it takes."
    )
    slowest = serializers.CharField(help_text="What takes longest: a gate or a floor.")
    never = serializers.CharField(help_text="A gate that this traffic does not decide; else empty.")


class StepSerializer(serializers.Serializer[Any]):
    """One step of the policy, or with index -1 the time until the candidate is ready."""

    index = serializers.IntegerField()
    kind = serializers.CharField()
    title = serializers.CharField()
    phase = serializers.ChoiceField(choices=[phase.value for phase in Phase])
    share = serializers.FloatField(help_text="How much of it is done, from 0 to 1.")
    entered_at = serializers.DateTimeField(allow_null=True)
    left_at = serializers.DateTimeField(allow_null=True)
    deadline_at = serializers.DateTimeField(allow_null=True)
    outcome = serializers.CharField(help_text="What ended it: a trigger of the state machine.")
    reason = serializers.CharField()
    floor = serializers.IntegerField(help_text="Observations that each segment has to bring.")
    reached = serializers.IntegerField(help_text="How many the segment has that has fewest.")
    least = serializers.CharField(help_text="Which segment that is.")
    gates_passed = serializers.IntegerField(source="num_passed")
    gates = serializers.IntegerField(source="num_gates", help_text="That the step ends with.")
    lasts_s = serializers.FloatField(allow_null=True, help_text="It lasts this long at least.")
    expected = ExpectedSerializer()


class GateSerializer(serializers.Serializer[Any]):
    """One metric on one segment. Numbers are null below the minimum sample.

    ``estimate``, ``lower`` and ``upper`` are of candidate minus incumbent (latency: of the share beyond the limit); each
    bound holds at all times with probability 1 - alpha. An e-value of 1/alpha or more has shown its claim.
    """

    metric = serializers.CharField()
    kind = serializers.CharField()
    segment = serializers.DictField(child=serializers.CharField(), help_text="{}: all traffic.")
    name = serializers.CharField()
    verdict = serializers.ChoiceField(choices=VERDICTS)
    is_critical = serializers.BooleanField()
    n = serializers.IntegerField()
    estimate = serializers.FloatField(allow_null=True)
    lower = serializers.FloatField(allow_null=True)
    upper = serializers.FloatField(allow_null=True)
    tolerance = serializers.FloatField()
    margin = serializers.FloatField()
    e_harm = serializers.FloatField(allow_null=True, help_text="For: worse than the tolerance.")
    e_safe = serializers.FloatField(allow_null=True, help_text="For: no worse than the margin.")
    needed = serializers.IntegerField(
        allow_null=True, help_text="About how many more observations until a verdict."
    )
    incumbent = serializers.FloatField(allow_null=True, help_text="Mean of the incumbent's own.")
    candidate = serializers.FloatField(allow_null=True, help_text="Mean of the candidate's own.")
    coverage = serializers.FloatField(
        allow_null=True, help_text="Share of the intended comparisons that took place."
    )
    sentence = serializers.CharField()


class GatesSerializer(serializers.Serializer[Any]):
    """All of them on one page."""

    next = serializers.CharField(allow_null=True)
    previous = serializers.CharField(allow_null=True)
    results = GateSerializer(many=True)


class EntrySerializer(serializers.Serializer[Any]):
    """An event, or the first of looks that say the same."""

    at = serializers.DateTimeField()
    kind = serializers.ChoiceField(choices=["event", "look"])
    type = serializers.CharField()
    actor = serializers.CharField(help_text="Empty for a look.")
    reason = serializers.CharField()
    sequence = serializers.IntegerField(
        allow_null=True, help_text="Of an event, in the chain of all events."
    )
    data = serializers.DictField()  # type: ignore[assignment]


class TimelineSerializer(serializers.Serializer[Any]):
    """What happened, on one page."""

    next = serializers.CharField(allow_null=True)
    previous = serializers.CharField(allow_null=True)
    results = EntrySerializer(many=True)


class FloorSerializer(serializers.Serializer[Any]):
    """How many of ``n`` compared pairs differ at all."""

    different = serializers.IntegerField()
    n = serializers.IntegerField()


class ArmSerializer(serializers.Serializer[Any]):
    """One kind of copy: what is known of its pairs, which copies never ran, and what those cost that did."""

    arm = serializers.CharField(source="name")
    compared = serializers.IntegerField()
    failed = serializers.IntegerField(help_text="The copy ran, and has no answer.")
    unobserved = serializers.DictField(
        child=serializers.IntegerField(), help_text="Nothing is known of the candidate, by reason."
    )
    skips = serializers.DictField(
        child=serializers.IntegerField(),
        allow_null=True,
        help_text="Copies that were not made, or dropped before they ran, by reason; null while Redis is away.",
    )
    coverage = serializers.FloatField(allow_null=True)
    prompt_tokens = serializers.IntegerField()
    completion_tokens = serializers.IntegerField()
    engine_s = serializers.FloatField(help_text="Billed to nobody.")


class CopiesSerializer(serializers.Serializer[Any]):
    """The copies of a rollout: ``floor`` is the incumbent against itself, ``candidate`` against the incumbent."""

    arms = ArmSerializer(many=True)
    floor = FloorSerializer()
    candidate = FloorSerializer()


class PairSerializer(serializers.ModelSerializer[Pair]):
    """Two answers to one request. Texts are null where the endpoint does not keep them, or keeps them no longer."""

    segments = serializers.DictField(child=serializers.CharField())
    incumbent_flags = serializers.ListField(child=serializers.CharField())
    candidate_flags = serializers.ListField(child=serializers.CharField())

    class Meta:
        model = Pair
        fields = (
            "request_id",
            "arm",
            "at",
            "state",
            "reason",
            "segments",
            "classifier",
            "prompt_tokens",
            "prompt",
            *(
                f"{who}{what}"
                for who in ("incumbent", "candidate")
                for what in (
                    *("", "_fingerprint", "_outcome", "_finish", "_flags", "_tokens"),
                    *("_engine_s", "_total_s", "_text"),
                )
            ),
            "differs",
            "similarity",
            "mean_logprob",
            "agreement",
            "scorer",
            "score",
        )
        read_only_fields = fields


class GateQuery(serializers.Serializer[Any]):
    """What gates can be narrowed to."""

    metric = serializers.CharField(required=False)
    verdict = serializers.ChoiceField(required=False, choices=VERDICTS)


class PairQuery(serializers.Serializer[Any]):
    """What pairs can be narrowed to."""

    disagree = serializers.BooleanField(required=False, allow_null=True)
    arm = serializers.ChoiceField(required=False, choices=ARMS)
    state = serializers.ChoiceField(required=False, choices=Pair.State.choices)


class RolloutTimeline(Resource):
    """What happened to a rollout."""

    read_role = "viewer"

    @extend_schema(operation_id="rollouts_timeline", responses=TimelineSerializer)
    def get(self, request: Request, rollout: str) -> Response:  # noqa: ARG002 (the framework's signature)
        """Events, and looks at the gates that said something new, the newest first; the newest 500 of each."""
        return _one_page(EntrySerializer, timeline_of(services.find(rollout)))


class RolloutSegments(Resource):
    """The numbers of a rollout's gates."""

    read_role = "viewer"
    query = GateQuery

    @extend_schema(
        operation_id="rollouts_segments",
        parameters=[
            OpenApiParameter("metric", str),
            OpenApiParameter("verdict", str, enum=VERDICTS),
        ],
        responses=GatesSerializer,
    )
    def get(self, request: Request, rollout: str) -> Response:  # noqa: ARG002
        """Each metric on each segment, as the last look saw it, the worst verdicts first."""
        wanted = self.wanted().items()
        rows = gates_of(services.find(rollout))
        found = [row for row in rows if all(getattr(row, name) == value for name, value in wanted)]
        return _one_page(GateSerializer, found)


class RolloutCopies(Resource):
    """What the copies of a rollout's requests have come to."""

    read_role = "viewer"

    @extend_schema(operation_id="rollouts_copies", responses=CopiesSerializer)
    def get(self, request: Request, rollout: str) -> Response:  # noqa: ARG002
        """Coverage, skipped copies by reason, cost, and how equal answers are."""
        return Response(CopiesSerializer(copies_of(services.find(rollout), connection())).data)


@extend_schema(
    parameters=[
        OpenApiParameter(
            "disagree",
            bool,
            description="true: one answer has flags that the other has not, or is none.",
        ),
        OpenApiParameter("arm", str, enum=list(ARMS)),
        OpenApiParameter("state", str, enum=list(Pair.State.values)),
    ]
)
class RolloutPairs(Resource, generics.ListAPIView[Pair]):
    """Pairs of answers, the newest first."""

    read_role = "viewer"
    query = PairQuery
    ordering = ("-id",)
    serializer_class = PairSerializer
    queryset = Pair.objects.all()

    def get_queryset(self) -> PairQuerySet:
        """Those of the rollout that the address names, narrowed by the query parameters."""
        wanted = self.wanted()
        disagree = wanted.pop("disagree", None)
        pairs = PairQuerySet(Pair).of_rollout(services.find(self.kwargs["rollout"]).key)
        if disagree is not None:
            other = PairQuerySet(Pair).disagreeing().values("pk")
            pairs = pairs.filter(pk__in=other) if disagree else pairs.exclude(pk__in=other)
        return pairs.filter(**wanted)


def _one_page(serializer: type[serializers.Serializer[Any]], rows: Any) -> Response:
    return Response({"next": None, "previous": None, "results": serializer(rows, many=True).data})
