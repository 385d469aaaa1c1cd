"""Models and versions in the admin: they are registered by services, and a ready version only gets a description."""

# Django fixes the signatures of these methods, used or not.
# ruff: noqa: ARG002
from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest
from unfold.admin import ModelAdmin
from unfold.decorators import display

from controlplane.registry.models import Model, Version


class WithoutAddOrDelete(ModelAdmin):
    """Rows that come from services and stay."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Registration is a service."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object | None = None) -> bool:
        """Logs and events go on speaking of the row."""
        return False


@admin.register(Model)
class ModelPage(WithoutAddOrDelete):
    """Lines of versions."""

    list_display = ("name", "description", "created_at")
    search_fields = ("name", "description")
    ordering = ("name",)
    readonly_fields = ("name", "created_at")


@admin.register(Version)
class VersionPage(WithoutAddOrDelete):
    """Versions, with everything that decides their answers."""

    list_display = (
        "name", "show_state", "dtype", "quantization", "context_length", "num_parameters", "size_mib", "created_at",
    )  # fmt: skip
    list_filter = ("state", "quantization", "dtype", "model")
    list_select_related = ("model",)
    search_fields = ("model__name", "description", "weights_digest", "source")
    ordering = ("model__name", "-number")

    def get_readonly_fields(
        self, request: HttpRequest, obj: Version | None = None
    ) -> tuple[str, ...]:
        """Everything but the description."""
        return tuple(
            field.name for field in Version._meta.fields if field.name not in ("id", "description")
        )

    @display(
        description="state",
        ordering="state",
        label={"ready": "success", "failed": "danger", "importing": "info", "pending": "warning"},
    )
    def show_state(self, version: Version) -> str:
        """The state as a coloured label."""
        return version.state

    @admin.display(description="size (MiB)", ordering="size_bytes")
    def size_mib(self, version: Version) -> str:
        """Bytes of the artifact, readable."""
        return "" if version.size_bytes is None else f"{version.size_bytes / 2**20:.1f}"
