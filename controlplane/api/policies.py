"""Policies of rollouts: saved in versions that never change, and presets to begin with."""

from __future__ import annotations

from typing import Any

from django.http import Http404
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import generics, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.drf import Body, actor_of
from controlplane.api.idempotency import IDEMPOTENCY_KEY, Idempotent
from controlplane.api.resources import Resource
from controlplane.rollouts import policies
from controlplane.rollouts.models import Policy, PolicyQuerySet
from controlplane.rollouts.presets import PRESETS


class PolicySerializer(serializers.ModelSerializer[Policy]):
    """One version of a policy."""

    id = serializers.CharField(source="__str__", help_text="name/version")
    document = serializers.DictField()

    class Meta:
        model = Policy
        fields = ("id", "name", "version", "description", "document", "created_at", "created_by")
        read_only_fields = fields


SAVED = {
    201: PolicySerializer,
    200: OpenApiResponse(PolicySerializer, description="The newest version says that already."),
}


class PresetSerializer(serializers.Serializer[Any]):
    """A policy to begin with. It is saved as version 1 when it is first used."""

    name = serializers.CharField()
    document = serializers.DictField()


class PresetsSerializer(serializers.Serializer[Any]):
    """All presets on one page."""

    next = serializers.CharField(allow_null=True)
    previous = serializers.CharField(allow_null=True)
    results = PresetSerializer(many=True)


class PolicyDocument(Body):
    """What a candidate has to show, step by step."""

    document = serializers.DictField(
        help_text="Fields that it does not know, gates that no step measures and margins that the declared traffic "
        "cannot reach in time are refused with 422 invalid_policy, which names field, value and mend."
    )
    description = serializers.CharField(default="", allow_blank=True, max_length=2000)


class NewPolicy(PolicyDocument):
    """The first version of a policy, or the next one of a name that is there."""

    name = serializers.CharField(max_length=64)


class PolicyQuery(serializers.Serializer[Any]):
    """What policies can be narrowed to."""

    name = serializers.CharField(required=False)


@extend_schema(parameters=[OpenApiParameter("name", str, description="Versions of this policy.")])
class PolicyList(Idempotent, generics.ListAPIView[Policy]):
    """Every version of every policy, the newest first."""

    read_role = "viewer"
    write_role = "engineer"
    query = PolicyQuery
    ordering = ("-id",)
    serializer_class = PolicySerializer
    queryset = Policy.objects.all()

    @extend_schema(request=NewPolicy, parameters=[IDEMPOTENCY_KEY], responses=SAVED)
    def post(self, request: Request) -> Response:
        """Save a document as the next version; one that is the newest version already adds none."""
        body = NewPolicy(data=request.data)
        body.is_valid(raise_exception=True)
        return _save(request, **body.validated_data)

    def get_queryset(self) -> PolicyQuerySet:
        """Narrowed by the query parameters."""
        return PolicyQuerySet(Policy).filter(**self.wanted())


class PolicyDetail(Idempotent):
    """The newest version of a policy."""

    read_role = "viewer"
    write_role = "engineer"

    @extend_schema(operation_id="policies_newest", responses=PolicySerializer)
    def get(self, request: Request, name: str) -> Response:  # noqa: ARG002 (the framework's signature)
        """What a rollout that names the policy without a version would be judged by."""
        newest = Policy.objects.newest(name).first()
        if newest is None:
            raise Http404(f"No policy {name!r} was saved; presets are at /api/v1/policy-presets.")
        return Response(PolicySerializer(newest).data)

    @extend_schema(request=PolicyDocument, parameters=[IDEMPOTENCY_KEY], responses=SAVED)
    def put(self, request: Request, name: str) -> Response:
        """Save the next version. Rollouts that run go on with the one they were started with."""
        body = PolicyDocument(data=request.data)
        body.is_valid(raise_exception=True)
        return _save(request, name=name, **body.validated_data)


class PolicyVersion(Resource, generics.RetrieveAPIView[Policy]):
    """One version of a policy."""

    read_role = "viewer"
    serializer_class = PolicySerializer
    queryset = Policy.objects.all()

    def get_object(self) -> Policy:
        """The version that the address names."""
        return get_object_or_404(
            self.get_queryset(), name=self.kwargs["name"], version=self.kwargs["number"]
        )


class PresetList(Resource):
    """Policies to begin with."""

    read_role = "viewer"

    @extend_schema(operation_id="policy_presets_list", responses=PresetsSerializer)
    def get(self, request: Request) -> Response:  # noqa: ARG002 (the framework's signature)
        """Their documents, to be used by name or changed and saved under another."""
        presets = [{"name": name, "document": document} for name, document in PRESETS.items()]
        results = PresetSerializer(presets, many=True).data
        return Response({"next": None, "previous": None, "results": results})


def _save(request: Request, **fields: Any) -> Response:
    now = timezone.now()
    policy = policies.save_policy(**fields, actor=actor_of(request), now=now)
    is_new = policy.created_at == now
    headers = {"Location": reverse("policy-version", args=[policy.name, policy.version])}
    answer = PolicySerializer(policy).data
    code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return Response(answer, status=code, headers=headers)
