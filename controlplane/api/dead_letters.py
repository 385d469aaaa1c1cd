"""Requests that were given up: each killed the slots that ran it, and its caller was told."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param

from controlplane.api.drf import page_size_of
from controlplane.api.resources import Resource
from controlplane.api.times import to_iso
from controlplane.endpoints.publication import connection
from controlplane.errors import DomainError
from inference.queue import DeadLetter, QueueUnavailable

_CURSOR = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class DeadLettersUnknown(DomainError):
    """Redis is away, and dead letters lie there."""

    code = "dead_letters_unknown"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    permanent = False


class DeadLetterSerializer(serializers.Serializer[Any]):
    """One request that was given up."""

    id = serializers.CharField(source="letter_id")
    request_id = serializers.CharField()
    endpoint = serializers.CharField()
    version = serializers.CharField(help_text="Whose slots died; model/number.")
    arm = serializers.CharField(help_text="live, candidate, or which kind of copy.")
    attempts = serializers.IntegerField(source="attempt")
    at = serializers.SerializerMethodField()

    def get_at(self, letter: DeadLetter) -> serializers.DateTimeField():  # type: ignore[valid-type]
        """When it was given up, by the clock of Redis."""
        return to_iso(letter.at_ms / 1000)


class DeadLettersSerializer(serializers.Serializer[Any]):
    """One page; ``next`` leads to older ones, and there is no way back but from the beginning."""

    next = serializers.CharField(allow_null=True)
    previous = serializers.CharField(allow_null=True)
    results = DeadLetterSerializer(many=True)


class DeadLetterList(Resource):
    """Requests that were given up, the newest first; the newest thousand are kept."""

    read_role = "viewer"
    is_paged = True

    @extend_schema(
        operation_id="dead_letters_list",
        parameters=[OpenApiParameter("cursor", str), OpenApiParameter("page_size", int)],
        responses=DeadLettersSerializer,
    )
    def get(self, request: Request) -> Response:
        """Which requests were given up, on which version, and when."""
        size = page_size_of(request)
        letters = _read(size + 1, before=_cursor_of(request))
        page, has_more = letters[:size], len(letters) > size
        following = (
            replace_query_param(request.build_absolute_uri(), "cursor", page[-1].letter_id)
            if has_more
            else None
        )
        results = DeadLetterSerializer(page, many=True).data
        return Response({"next": following, "previous": None, "results": results})


def _read(count: int, *, before: str) -> list[DeadLetter]:
    try:
        return connection().read_dead(count, before=before)
    except QueueUnavailable as error:
        raise DeadLettersUnknown(
            "Redis is away, so nobody knows which requests were given up.", retry_after_s=5
        ) from error


def _cursor_of(request: Request) -> str:
    cursor = request.query_params.get("cursor", "")
    if cursor and not _CURSOR.fullmatch(cursor):
        raise NotFound("Invalid cursor")
    return cursor
