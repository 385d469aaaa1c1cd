"""The request log in the admin."""

from __future__ import annotations

from django.contrib import admin
from unfold.paginator import InfinitePaginator

from controlplane.events.admin import ReadOnlyAdmin
from controlplane.monitoring.models import RequestLog


@admin.register(RequestLog)
class RequestLogAdmin(ReadOnlyAdmin):
    """Finished requests, the newest first."""

    list_display = (
        "request_id", "finished_at", "endpoint", "version", "arm", "outcome", "status", "prompt_tokens",
        "completion_tokens", "first_token_ms", "total_ms",
    )  # fmt: skip
    list_filter = ("endpoint", "version", "arm", "outcome", "streamed")
    search_fields = ("=request_id", "=key_id", "=user")
    ordering = ("-id",)
    list_per_page = 50
    # Counting millions of lines costs more than showing fifty.
    show_full_result_count = False
    paginator = InfinitePaginator

    @admin.display(description="first token (ms)")
    def first_token_ms(self, row: RequestLog) -> str:
        """Time to the first token."""
        return "" if row.first_token_s is None else f"{row.first_token_s * 1000:.0f}"

    @admin.display(description="total (ms)")
    def total_ms(self, row: RequestLog) -> str:
        """Time to the last token."""
        return f"{row.total_s * 1000:.0f}"
