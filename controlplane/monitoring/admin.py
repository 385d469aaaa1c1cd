"""The request log in the admin."""

# Django fixes the signatures of these methods, used or not.
# ruff: noqa: ARG002
from __future__ import annotations

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.contrib.filters.admin import DropdownFilter, RangeDateTimeFilter
from unfold.decorators import display
from unfold.paginator import InfinitePaginator

from controlplane.endpoints.models import Endpoint
from controlplane.events.admin import ReadOnlyAdmin, shorten
from controlplane.monitoring.models import RequestLog
from controlplane.registry.models import Version

MAX_CHOICES = 200


class EndpointFilter(DropdownFilter):
    """Endpoints that exist: asking a long log for every name in it would read all of it."""

    title = "endpoint"
    parameter_name = "endpoint"

    def lookups(self, request: HttpRequest, model_admin: object) -> list[tuple[str, str]]:
        """Their names."""
        names = Endpoint.objects.order_by("name").values_list("name", flat=True)
        return [(name, name) for name in names[:MAX_CHOICES]]

    def queryset(self, request: HttpRequest, rows: QuerySet[RequestLog]) -> QuerySet[RequestLog]:
        """Requests that asked for it."""
        return rows.filter(endpoint=self.value()) if self.value() else rows


class VersionFilter(DropdownFilter):
    """Versions that could have answered, the newest first."""

    title = "version"
    parameter_name = "version"

    def lookups(self, request: HttpRequest, model_admin: object) -> list[tuple[str, str]]:
        """Their names."""
        versions = Version.objects.ready().select_related("model").order_by("-pk")
        return [(version.name, version.name) for version in versions[:MAX_CHOICES]]

    def queryset(self, request: HttpRequest, rows: QuerySet[RequestLog]) -> QuerySet[RequestLog]:
        """Requests that it answered."""
        return rows.filter(version=self.value()) if self.value() else rows


class OutcomeFilter(DropdownFilter):
    """How a request ended; a failure's code is found by searching for it."""

    title = "outcome"
    parameter_name = "outcome"

    def lookups(self, request: HttpRequest, model_admin: object) -> list[tuple[str, str]]:
        """In three kinds."""
        return [("ok", "ok"), ("cancelled", "cancelled"), ("failed", "failed")]

    def queryset(self, request: HttpRequest, rows: QuerySet[RequestLog]) -> QuerySet[RequestLog]:
        """Requests that ended so."""
        if self.value() == "failed":
            return rows.exclude(outcome__in=("ok", "cancelled"))
        return rows.filter(outcome=self.value()) if self.value() else rows


@admin.register(RequestLog)
class RequestLogAdmin(ReadOnlyAdmin):
    """Finished requests, the newest first."""

    list_display = (
        "show_request", "finished_at", "endpoint", "show_version", "show_outcome", "show_tokens", "first_token_ms",
        "total_ms",
    )  # fmt: skip
    list_filter = (
        EndpointFilter,
        VersionFilter,
        OutcomeFilter,
        ("finished_at", RangeDateTimeFilter),
    )
    list_filter_submit = True
    search_fields = ("=request_id", "=key_id", "=user", "=outcome")
    search_help_text = "Request id, key id, user or failure code, in full"
    ordering = ("-id",)
    list_per_page = 50
    empty_hint = "A request appears here a second after it ended."
    # Counting millions of lines costs more than showing fifty.
    show_full_result_count = False
    paginator = InfinitePaginator

    @admin.display(description="request")
    def show_request(self, row: RequestLog) -> str:
        """The beginning of its id."""
        return shorten(row.request_id)

    @admin.display(description="version")
    def show_version(self, row: RequestLog) -> str:
        """Who answered, and by which arm where it was not the live one."""
        return f"{row.version} ({row.arm})" if row.arm not in ("", "live") else row.version or "-"

    @display(
        description="outcome", label={"ok": "success", "cancelled": "warning", "failed": "danger"}
    )
    def show_outcome(self, row: RequestLog) -> tuple[str, str]:
        """How it ended, coloured, with the status the caller saw."""
        kind = row.outcome if row.outcome in ("ok", "cancelled") else "failed"
        return kind, f"{row.outcome} {row.status}"

    @admin.display(description="tokens in, out")
    def show_tokens(self, row: RequestLog) -> str:
        """Of the prompt and of the answer."""
        return f"{row.prompt_tokens:,}, {row.completion_tokens:,}"

    @admin.display(description="first token (ms)")
    def first_token_ms(self, row: RequestLog) -> str:
        """Time to the first token."""
        return "-" if row.first_token_s is None else f"{row.first_token_s * 1000:,.0f}"

    @admin.display(description="total (ms)")
    def total_ms(self, row: RequestLog) -> str:
        """Time to the last token."""
        return f"{row.total_s * 1000:,.0f}"
