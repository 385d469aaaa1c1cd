"""What was used, by version, key or endpoint."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.resources import Resource
from controlplane.monitoring.usage import GROUPS, MAX_GROUPS, sum_usage

DEFAULT_WINDOW = timedelta(days=1)


class QuantilesSerializer(serializers.Serializer[Any]):
    """Seconds of ``n`` whole answers; a quantile beyond which fewer than one of them would lie is null."""

    n = serializers.IntegerField()
    p50 = serializers.FloatField(allow_null=True)
    p99 = serializers.FloatField(allow_null=True)


class UsageSerializer(serializers.Serializer[Any]):
    """One version, key or endpoint. Everything but ``num_requests`` is of whole answers."""

    name = serializers.CharField(help_text="model/number, id of the key, or name of the endpoint.")
    num_requests = serializers.IntegerField(help_text="All that ended, however they did.")
    num_ok = serializers.IntegerField(help_text="Those that got a whole answer.")
    prompt_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField(help_text="Of the prompts, not computed again.")
    completion_tokens = serializers.IntegerField()
    num_billed = serializers.IntegerField(help_text="Answers whose engine seconds are known.")
    engine_s = serializers.FloatField(help_text="Engine seconds attributed to them.")
    tokens_per_s = serializers.FloatField(
        allow_null=True, help_text="Generated tokens per attributed engine second."
    )
    total_s = QuantilesSerializer()
    first_token_s = QuantilesSerializer()
    engine_s_per_1k_tokens = serializers.FloatField(
        allow_null=True, help_text="Of generated tokens, the prompts' share included."
    )
    cost = serializers.FloatField(allow_null=True, help_text="Null while no price is set.")
    cost_per_request = serializers.FloatField(allow_null=True)
    cost_per_1k_tokens = serializers.FloatField(
        allow_null=True, help_text="Of generated tokens, the prompts' share included."
    )


class UsagePageSerializer(serializers.Serializer[Any]):
    """All groups on one page, those with most requests first."""

    group_by = serializers.ChoiceField(choices=sorted(GROUPS))
    since = serializers.DateTimeField()
    until = serializers.DateTimeField()
    price_per_hour = serializers.FloatField(
        allow_null=True, help_text="Of an hour of one engine slot: TATKAL_COST_PER_HOUR."
    )
    next = serializers.CharField(allow_null=True)
    previous = serializers.CharField(allow_null=True)
    results = UsageSerializer(many=True)


class UsageQuery(serializers.Serializer[dict[str, Any]]):
    """What is summed, and over which time."""

    group_by = serializers.ChoiceField(choices=sorted(GROUPS), default="version")
    since = serializers.DateTimeField(required=False)
    until = serializers.DateTimeField(required=False)


class UsageList(Resource):
    """Requests, tokens, engine seconds, times and cost."""

    query = UsageQuery
    read_role = "viewer"

    @extend_schema(
        operation_id="usage_list",
        responses=UsagePageSerializer,
        parameters=[
            OpenApiParameter("group_by", str, enum=sorted(GROUPS), default="version"),
            OpenApiParameter("since", str, description="Finished at or after; a day before until."),
            OpenApiParameter("until", str, description="Finished before, ISO 8601; now."),
        ],
        description=f"The {MAX_GROUPS} groups with most requests.",
    )
    def get(self, _request: Request) -> Response:
        """By version, key or endpoint, of the last day where nothing is said; a malformed parameter is a 400."""
        wanted = self.wanted()
        group_by = wanted["group_by"]
        until: datetime = wanted.get("until", timezone.now())
        since: datetime = wanted.get("since", until - DEFAULT_WINDOW)
        price: float | None = settings.COST_PER_HOUR
        found = sum_usage(group_by=group_by, since=since, until=until, price_per_hour=price)
        page = {
            "group_by": group_by,
            "since": since,
            "until": until,
            "price_per_hour": price,
            "next": None,
            "previous": None,
            "results": found,
        }
        return Response(UsagePageSerializer(page).data)
