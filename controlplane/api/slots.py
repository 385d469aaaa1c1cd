"""Engine slots, as they report."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.resources import Resource
from controlplane.api.times import to_iso
from controlplane.endpoints.publication import connection
from controlplane.endpoints.slots import read_slots
from controlplane.errors import DomainError
from inference.queue import QueueUnavailable
from inference.replicas import SlotState, SlotStatus


class SlotsUnknown(DomainError):
    """Redis is away, and slots report there."""

    code = "slots_unknown"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    permanent = False


class ReportSerializer(serializers.Serializer[Any]):
    """A slot's last report; ``endpoint`` and ``version`` are empty while it holds none."""

    slot = serializers.CharField()
    endpoint = serializers.CharField()
    version = serializers.CharField()
    state = serializers.ChoiceField(choices=[state.value for state in SlotState])
    detail = serializers.CharField()
    role = serializers.CharField()
    kernel = serializers.CharField(help_text="What computes its steps, and in which numbers.")
    fingerprint = serializers.CharField(
        help_text="Digest over all that may change a token, such as weights, kernel and dtype."
    )
    runtime = serializers.CharField(
        help_text="Interpreter and digest of a version that has its own, which its fingerprint holds too."
    )
    probe = serializers.CharField(
        help_text="Digest of its first answers; equal where fingerprints are."
    )
    weight_bytes = serializers.IntegerField()
    kv_blocks_used = serializers.IntegerField()
    kv_blocks = serializers.IntegerField(help_text="What the cache has now.")
    kv_blocks_full = serializers.IntegerField(help_text="What the cache may grow to.")
    telemetry = serializers.DictField(
        child=serializers.FloatField(allow_null=True),
        help_text=(
            "The last ten seconds: mbu and mfu (null until this machine is calibrated), intensity, bytes_per_s and "
            "flops_per_s while it computed, busy, batch_rows, tokens_per_s, prefix_hit_rate. And kv_used, kv_cached, "
            "kv_free, queue_age_s now, num_preemptions since it was loaded."
        ),
    )
    loaded_in_s = serializers.FloatField()
    retry_at = serializers.SerializerMethodField()
    updated_at = serializers.SerializerMethodField()

    def get_retry_at(self, slot: SlotStatus) -> serializers.DateTimeField(allow_null=True):  # type: ignore[valid-type]
        """When a failed load is tried again."""
        return to_iso(slot.retry_at)

    def get_updated_at(self, slot: SlotStatus) -> serializers.DateTimeField():  # type: ignore[valid-type]
        """When it reported, by the clock of Redis."""
        return to_iso(slot.updated_at)


class SlotsSerializer(serializers.Serializer[Any]):
    """All slots on one page."""

    next = serializers.CharField(allow_null=True)
    previous = serializers.CharField(allow_null=True)
    results = ReportSerializer(many=True)


class SlotList(Resource):
    """Every slot that has reported lately, by name."""

    read_role = "viewer"

    @extend_schema(operation_id="slots_list", responses=SlotsSerializer)
    def get(self, request: Request) -> Response:  # noqa: ARG002 (the framework's signature)
        """Which slot holds which version of which endpoint, and how it fares."""
        try:
            slots = read_slots(queue=connection())
        except QueueUnavailable as error:
            raise SlotsUnknown(
                "Redis is away, so nobody knows how the slots fare.", retry_after_s=5
            ) from error
        return Response(
            {"next": None, "previous": None, "results": ReportSerializer(slots, many=True).data}
        )
