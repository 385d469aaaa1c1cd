"""The request log, what callers thought of answers, and the list of terms in the admin."""

# Django fixes the signatures of these methods, used or not.
# ruff: noqa: ARG002
from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path
from django.utils import timezone
from unfold.admin import ModelAdmin
from unfold.contrib.filters.admin import DropdownFilter, RangeDateTimeFilter
from unfold.decorators import display
from unfold.paginator import InfinitePaginator

from controlplane.access.models import ApiKey
from controlplane.endpoints.models import Endpoint
from controlplane.events.admin import ReadOnlyAdmin, shorten
from controlplane.monitoring import services
from controlplane.monitoring.models import Feedback, FlaggedTerm, RequestLog
from controlplane.monitoring.usage import GROUPS, Usage, sum_usage
from controlplane.registry.models import Version

MAX_CHOICES = 200
USAGE_TEMPLATE = "admin/monitoring/requestlog/usage.html"
WINDOWS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(days=7)}


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
        "total_ms", "engine_ms",
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
        cached = f" ({row.cached_tokens:,} cached)" if row.cached_tokens else ""
        return f"{row.prompt_tokens:,}{cached}, {row.completion_tokens:,}"

    @admin.display(description="first token (ms)")
    def first_token_ms(self, row: RequestLog) -> str:
        """Time to the first token."""
        return "-" if row.first_token_s is None else f"{row.first_token_s * 1000:,.0f}"

    @admin.display(description="total (ms)")
    def total_ms(self, row: RequestLog) -> str:
        """Time to the last token."""
        return f"{row.total_s * 1000:,.0f}"

    @admin.display(description="engine (ms)")
    def engine_ms(self, row: RequestLog) -> str:
        """Its share of the engine's time."""
        return "-" if row.engine_s is None else f"{row.engine_s * 1000:,.1f}"

    def get_urls(self) -> list[Any]:
        """The sums, before the addresses that take any id."""
        view = self.admin_site.admin_view(self.usage_view)
        return [path("usage/", view, name="monitoring_usage"), *super().get_urls()]

    def usage_view(self, request: HttpRequest) -> HttpResponse:
        """What versions, keys or endpoints used and cost; an address that was made up shows the day by version."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        group_by, window = request.GET.get("group_by", ""), request.GET.get("window", "")
        group_by = group_by if group_by in GROUPS else "version"
        window = window if window in WINDOWS else "day"
        now, price = timezone.now(), settings.COST_PER_HOUR
        found = sum_usage(
            group_by=group_by, since=now - WINDOWS[window], until=now, price_per_hour=price
        )
        context = {
            "title": "Usage",
            "groups": list(GROUPS),
            "windows": list(WINDOWS),
            "group_by": group_by,
            "window": window,
            "price": price,
            "rows": [
                {"usage": each, "label": label, "num_failed": each.num_requests - each.num_ok}
                for each, label in zip(found, _labels(group_by, found), strict=True)
            ],
        }
        shared = self.admin_site.each_context(request)
        return TemplateResponse(request, USAGE_TEMPLATE, {**shared, **context})


def _labels(group_by: str, found: Sequence[Usage]) -> list[str]:
    """What people call the groups: keys have names."""
    names: dict[str, str] = {}
    if group_by == "key":
        keys = ApiKey.objects.filter(key_id__in=[each.name for each in found])
        names = dict(keys.values_list("key_id", "name"))
    return [names.get(each.name, each.name) or "-" for each in found]


@admin.register(Feedback)
class FeedbackAdmin(ReadOnlyAdmin):
    """What callers thought of answers, the newest first."""

    list_display = ("show_request", "at", "endpoint", "version", "arm", "rating")
    list_filter = (EndpointFilter, VersionFilter)
    list_filter_submit = True
    search_fields = ("=request_id",)
    search_help_text = "Request id, in full"
    ordering = ("-id",)
    list_per_page = 50
    empty_hint = "Callers send it to /v1/feedback of the gateway."
    show_full_result_count = False
    paginator = InfinitePaginator

    @admin.display(description="request")
    def show_request(self, row: Feedback) -> str:
        """The beginning of its id."""
        return shorten(row.request_id)


@admin.register(FlaggedTerm)
class FlaggedTermAdmin(ModelAdmin):
    """The list of terms that no answer should hold."""

    list_display = ("term", "is_active", "note")
    search_fields = ("term",)
    ordering = ("term",)

    def has_delete_permission(self, request: HttpRequest, obj: FlaggedTerm | None = None) -> bool:
        """Terms that count no more stay, to tell what was looked for before."""
        return False

    def save_model(
        self, request: HttpRequest, obj: FlaggedTerm, form: object, change: bool
    ) -> None:
        """One call of the service."""
        services.save_term(term=obj, actor=request.user.get_username(), now=timezone.now())
