"""Events and the outbox in the admin: to look at, never to change."""

# Django fixes the signatures of these methods, used or not.
# ruff: noqa: ARG002
from __future__ import annotations

import json

from django.contrib import admin
from django.http import HttpRequest
from unfold.admin import ModelAdmin

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


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    """The audit log."""

    list_display = ("sequence", "at", "type", "subject", "actor", "reason")
    list_filter = ("type", "actor")
    search_fields = ("subject", "actor", "reason", "type")
    date_hierarchy = "at"
    ordering = ("-sequence",)
    fields = (
        "sequence", "at", "type", "subject", "actor", "reason", "pretty_payload", "previous_hash", "hash",
    )  # fmt: skip

    @admin.display(description="data")
    def pretty_payload(self, event: Event) -> str:
        """The payload, one field a line."""
        return json.dumps(event.data, indent=2, ensure_ascii=False)


@admin.register(Outbox)
class OutboxAdmin(ReadOnlyAdmin):
    """Work that events left behind; a row without ``done_at`` still waits."""

    list_display = ("event", "topic", "subject", "created_at", "done_at")
    list_filter = ("topic",)
    search_fields = ("subject",)
    ordering = ("-id",)
