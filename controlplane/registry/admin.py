"""Models and versions in the admin: registered by a form, watched while they load, never changed afterwards."""

# Django fixes the signatures of these methods, used or not.
# ruff: noqa: ARG002
from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import Count, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from unfold.admin import ModelAdmin
from unfold.contrib.filters.admin import (
    ChoicesDropdownFilter,
    RangeDateTimeFilter,
    RelatedDropdownFilter,
)
from unfold.decorators import action, display

from controlplane.errors import DomainError
from controlplane.events.admin import pretty_json, shorten
from controlplane.registry import services
from controlplane.registry.forms import RegisterForm, initial_from
from controlplane.registry.models import Model, Version

REFRESH_S = 2
ROWS = {"description": 2, "notes": 4, "engine_options": 3, "runtime": 3}
ONE_SAVE = {"show_save_and_add_another": False, "show_save_and_continue": False}
# The importer's codes in plain words; its own message, which names file, field and mend, follows.
REASONS = {
    "broken_artifact": "The source is damaged or incomplete.",
    "crashed": "The import ended without a word of its own, often for want of memory.",
    "internal": "The importer itself failed.",
    "interrupted": "The import was stopped, and begins again.",
    "io_error": "The source could not be read.",
    "out_of_memory": "The import needs more memory than it may use.",
    "source_refused": "The source is not where it may be.",
    "timed_out": "The import took too long.",
    "unsafe_artifact": "The source reaches outside its directory, or wants to run code.",
    "unsupported_format": "This kind of file is not read.",
    "unsupported_model": "This kind of model is not run.",
}


@admin.register(Model)
class ModelPage(ModelAdmin):
    """Lines of versions."""

    list_display = ("name", "description", "num_versions", "newest", "created_at")
    search_fields = ("name", "description")
    ordering = ("name",)
    fields = ("name", "description", "versions", "created_at")
    readonly_fields = ("name", "versions", "created_at")
    empty_hint = "A model appears with its first version: register one under Versions."

    def has_add_permission(self, request: HttpRequest) -> bool:
        """A model comes with its first version."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object | None = None) -> bool:
        """Logs and events go on speaking of the row."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Model]:
        """With the number of versions."""
        models: QuerySet[Model] = super().get_queryset(request)
        return models.annotate(num_versions=Count("versions"))

    @admin.display(description="versions", ordering="num_versions")
    def num_versions(self, model: Any) -> int:
        """How many it has."""
        return int(model.num_versions)

    @admin.display(description="newest")
    def newest(self, model: Model) -> str:
        """The version with the highest number."""
        newest = model.versions.select_related("model").order_by("-number").first()
        return _link(newest) if newest else "-"

    @admin.display(description="versions")
    def versions(self, model: Model) -> str:
        """All of them, to be opened."""
        return _links(model.versions.order_by("-number"))


@admin.register(Version)
class VersionPage(ModelAdmin):
    """Versions, with everything that decides their answers."""

    list_display = (
        "show_name", "show_state", "dtype", "quantization", "show_context", "show_parameters", "show_size",
        "created_at",
    )  # fmt: skip
    list_filter = (
        ("state", ChoicesDropdownFilter),
        ("model", RelatedDropdownFilter),
        ("dtype", ChoicesDropdownFilter),
        ("created_at", RangeDateTimeFilter),
    )
    list_filter_submit = True
    list_select_related = ("model",)
    search_fields = (
        "model__name", "description", "notes", "weights_digest", "source", "created_by",
    )  # fmt: skip
    ordering = ("-id",)
    empty_hint = "Register the first version with the button above."
    actions_detail = ("register_again",)
    add_fieldsets = (
        (None, {"fields": ("model_name", "source_kind", "source", "description")}),
        ("How it computes", {"fields": ("dtype", "keep_quantized", "engine_options", "chat_template", "runtime")}),
        ("Lineage", {"fields": ("parent", "run_link", "notes")}),
    )  # fmt: skip
    fieldsets: tuple[Any, ...] = (
        (None, {"fields": ("show_name", "state_now", "show_progress", "description", "notes", "run_link")}),
        ("What it is", {"fields": (
            "dtype", "quantization", "show_context", "show_parameters", "show_size", "show_engine_options",
            "show_generation_defaults", "show_runtime",
        )}),
        ("Where it comes from", {"fields": (
            "source_kind", "source", "chat_template", "show_run", "show_parent", "show_children", "created_by", "created_at",
            "ready_at",
        )}),
        ("Digests", {"fields": ("show_weights", "show_tokenizer", "show_template", "artifact")}),
    )  # fmt: skip
    editable = ("description", "notes", "run_link")

    def get_form(
        self,
        request: HttpRequest,
        obj: Version | None = None,
        change: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The form of a new version."""
        if obj is None:
            kwargs["form"] = RegisterForm
        return super().get_form(request, obj, change=change, **kwargs)

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Text areas as high as what usually stands in them."""
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if db_field.name in ROWS:
            field.widget.attrs["rows"] = ROWS[db_field.name]
        return field

    def get_readonly_fields(
        self, request: HttpRequest, obj: Version | None = None
    ) -> tuple[str, ...]:
        """All but what people say of it; all while the page renews itself, so that no typing is lost."""
        if obj is None:
            return ()
        editable = self.editable if obj.is_settled else ()
        shown = [name for _, options in self.fieldsets for name in options["fields"]]
        return tuple(name for name in shown if name not in editable)

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """``?from=<id>`` begins with that version."""
        origin = request.GET.get("from", "")
        known = (
            Version.objects.select_related("model").filter(pk=int(origin))
            if origin.isdecimal()
            else None
        )
        version = known.first() if known is not None else None
        return initial_from(version) if version else {"source_kind": Version.SourceKind.GGUF}

    def has_delete_permission(self, request: HttpRequest, obj: object | None = None) -> bool:
        """Logs and events go on speaking of the row."""
        return False

    def has_register_permission(self, request: HttpRequest, object_id: object = None) -> bool:
        """Whether the button is shown: who may add a version may register one again."""
        return bool(self.has_add_permission(request))

    def save_model(self, request: HttpRequest, obj: Version, form: Any, change: bool) -> None:
        """Register, or keep what people say."""
        if change:
            super().save_model(request, obj, form, change)
            return
        version = services.register(
            draft=form.draft, actor=request.user.get_username(), now=timezone.now()
        )
        obj.pk = version.pk
        obj.refresh_from_db()

    def add_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """The form; what changed between its check and its saving is told as well."""
        try:
            response: HttpResponse = super().add_view(
                request, *args, extra_context={**ONE_SAVE}, **kwargs
            )
        except DomainError as error:
            self.message_user(request, error.message, messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())
        return response

    def response_add(self, request: HttpRequest, obj: Version, *args: Any) -> HttpResponse:
        """On to the page where the import can be watched."""
        self.message_user(request, f"{obj.name} is registered; its import begins within seconds.")
        return HttpResponseRedirect(reverse("admin:registry_version_change", args=[obj.pk]))

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> Any:
        """The page renews itself until the import has ended."""
        version = self.get_object(request, object_id)
        is_changing = version is not None and not version.is_settled
        context = {**ONE_SAVE, "show_save": not is_changing}
        response = super().change_view(request, object_id, *args, extra_context=context, **kwargs)
        return _renewed(response, is_changing)

    def changelist_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """The list renews itself while an import runs or waits."""
        response = super().changelist_view(request, *args, **kwargs)
        return _renewed(response, Version.objects.unsettled().exists())

    @action(description="Register again", permissions=["register"], icon="content_copy")
    def register_again(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The form, filled with this version: change options, template or runtime there."""
        return HttpResponseRedirect(f"{reverse('admin:registry_version_add')}?from={object_id}")

    @admin.display(description="version", ordering="model__name")
    def show_name(self, version: Version) -> str:
        """As routes and logs call it."""
        return version.name

    @display(
        description="state",
        ordering="state",
        label={"ready": "success", "failed": "danger", "importing": "info", "pending": "warning"},
    )
    def show_state(self, version: Version) -> tuple[str, str]:
        """The state as a coloured label, with how far an import is."""
        return version.state, f"{version.state}{_percent(version)}"

    @admin.display(description="state")
    def state_now(self, version: Version) -> str:
        """The same for the page."""
        return f"{version.state}{_percent(version)}"

    @admin.display(description="import")
    def show_progress(self, version: Version) -> str:
        """What the import is doing, or why it failed."""
        if version.state == Version.State.PENDING:
            return "Waits for the tasks worker, which looks every few seconds."
        if version.state == Version.State.IMPORTING:
            what = (version.import_progress or {}).get("what", "starting")
            return f"{_percent(version).strip() or 'Begun'}: {what}"
        return "Whole, and its digests are known." if version.is_ready else explain(version)

    @admin.display(description="context", ordering="context_length")
    def show_context(self, version: Version) -> str:
        """Tokens that one conversation can have."""
        return _number(version.context_length)

    @admin.display(description="parameters", ordering="num_parameters")
    def show_parameters(self, version: Version) -> str:
        """How many weights it has."""
        return _number(version.num_parameters)

    @admin.display(description="size", ordering="size_bytes")
    def show_size(self, version: Version) -> str:
        """Of the artifact on disk."""
        return "-" if version.size_bytes is None else f"{version.size_bytes / 2**20:,.1f} MiB"

    @admin.display(description="engine options")
    def show_engine_options(self, version: Version) -> str:
        """What it asks of the engine beyond the machine's settings."""
        return pretty_json(version.engine_options)

    @admin.display(description="generation defaults")
    def show_generation_defaults(self, version: Version) -> str:
        """Sampling where a request says nothing."""
        return pretty_json(version.generation_defaults)

    @admin.display(description="runtime")
    def show_runtime(self, version: Version) -> str:
        """Interpreter and libraries."""
        return pretty_json(version.runtime)

    @admin.display(description="run")
    def show_run(self, version: Version) -> str:
        """The training run, to be opened; only http and https get this far."""
        if not version.run_link:
            return "-"
        return format_html(
            '<a class="tatkal-link" rel="noreferrer" target="_blank" href="{}">{}</a>',
            version.run_link,
            version.run_link,
        )

    @admin.display(description="parent")
    def show_parent(self, version: Version) -> str:
        """What it was made from."""
        return _link(version.parent) if version.parent else "-"

    @admin.display(description="made from it")
    def show_children(self, version: Version) -> str:
        """What was made from it."""
        return _links(version.children.order_by("pk"))

    @admin.display(description="weights")
    def show_weights(self, version: Version) -> str:
        """SHA-256 of the weights."""
        return shorten(version.weights_digest, shown=16)

    @admin.display(description="tokenizer")
    def show_tokenizer(self, version: Version) -> str:
        """SHA-256 of the tokenizer."""
        return shorten(version.tokenizer_digest, shown=16)

    @admin.display(description="chat template")
    def show_template(self, version: Version) -> str:
        """SHA-256 of the chat template."""
        return shorten(version.chat_template_digest, shown=16)


def explain(version: Version) -> str:
    """Why an import failed: in plain words, then as the importer said it."""
    code, _, message = version.state_reason.partition(": ")
    return f"{REASONS.get(code, code)} {message}"


def _renewed(response: Any, is_changing: bool) -> Any:
    if is_changing and response.status_code == 200:
        response["Refresh"] = str(REFRESH_S)
    return response


def _percent(version: Version) -> str:
    shown = version.import_progress or {}
    return f" {100 * shown['done'] // shown['total']} %" if shown.get("total") else ""


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _link(version: Version) -> str:
    address = reverse("admin:registry_version_change", args=[version.pk])
    return format_html('<a class="tatkal-link" href="{}">{}</a>', address, version.name)


def _links(versions: QuerySet[Version]) -> str:
    found = [(_link(version),) for version in versions.select_related("model")[:50]]
    return format_html_join(", ", "{}", found) or "-"
