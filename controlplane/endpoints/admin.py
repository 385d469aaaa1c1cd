"""Endpoints in the admin: what leads where, and whether Redis has heard of it."""

from __future__ import annotations

from django.contrib import admin
from unfold.decorators import display

from controlplane.endpoints.models import Endpoint
from controlplane.events.admin import ReadOnlyAdmin


@admin.register(Endpoint)
class EndpointPage(ReadOnlyAdmin):
    """Endpoints with their roles. A route changes through services, which write the event with it."""

    list_display = (
        "name", "live", "previous", "candidate", "canary_bp", "generation", "show_published", "updated_at",
    )  # fmt: skip
    list_filter = ("store_texts",)
    list_select_related = ("live__model", "previous__model", "candidate__model")
    search_fields = ("name",)
    ordering = ("name",)

    @display(description="published", boolean=True)
    def show_published(self, endpoint: Endpoint) -> bool:
        """Whether Redis confirmed the newest generation."""
        return endpoint.is_published
