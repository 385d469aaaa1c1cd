"""Events and the outbox in the admin: to look at, never to change."""

# Django fixes the signatures of these methods, used or not.
# ruff: noqa: ARG002
from __future__ import annotations

import json
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from unfold.admin import ModelAdmin
from unfold.contrib.filters.admin import AllValuesCheckboxFilter, RangeDateTimeFilter
from unfold.decorators import display

from controlplane.events.models import Event, Outbox


class ReadOnlyAdmin(ModelAdmin):
    """An admin page that shows rows and changes none."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows come from services alone."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object | None = None) -> bool:
        """Rows are shown as text."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object | None = None) -> bool:
        """Rows stay."""
        return False


def shorten(text: str, *, shown: int = 8) -> str:
    """The beginning of a long id or digest; hovering shows all of it, and selecting it copies all of it."""
    if len(text) <= shown:
        return text or "-"
    return format_html(
        '<span class="tatkal-long" style="--shown: {}ch" title="{}">{}</span>',
        shown + 2,
        text,
        text,
    )


def pretty_json(value: Any) -> str:
    """One field a line; a dash for nothing."""
    if not value:
        return "-"
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)
    return format_html('<pre class="tatkal-json">{}</pre>', text)


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    """The audit log."""

    list_display = ("sequence", "at", "type", "subject", "actor", "reason")
    list_filter = (
        ("type", AllValuesCheckboxFilter),
        ("actor", AllValuesCheckboxFilter),
        ("at", RangeDateTimeFilter),
    )
    list_filter_submit = True
    search_fields = ("subject", "actor", "reason", "type")
    ordering = ("-sequence",)
    fields = (
        "sequence",
        "at",
        "type",
        "subject",
        "actor",
        "reason",
        "show_data",
        "previous_hash",
        "hash",
    )
    empty_hint = "Every change of a route, a version or a key is recorded here."

    @admin.display(description="data")
    def show_data(self, event: Event) -> str:
        """The numbers and names behind the event."""
        return pretty_json(event.data)


@admin.register(Outbox)
class OutboxAdmin(ReadOnlyAdmin):
    """Work that events left behind; a row without ``done_at`` still waits."""

    list_display = ("subject", "topic", "show_state", "event", "created_at", "done_at")
    list_filter = (("topic", AllValuesCheckboxFilter), ("created_at", RangeDateTimeFilter))
    list_filter_submit = True
    list_select_related = ("event",)
    search_fields = ("subject",)
    ordering = ("-id",)
    empty_hint = "Changes wait here until Redis has them, usually for less than a second."

    @display(description="state", label={"done": "success", "waiting": "warning"})
    def show_state(self, row: Outbox) -> str:
        """Whether it has been carried out."""
        return "done" if row.done_at else "waiting"
