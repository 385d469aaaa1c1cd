"""Endpoints in the admin: what leads where and how it fares, and the buttons that move routes."""

# Django fixes the signatures of these methods, used or not.
# ruff: noqa: ARG002
from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.safestring import mark_safe
from unfold.admin import ModelAdmin
from unfold.decorators import display

from controlplane.endpoints import services
from controlplane.endpoints.desk import (
    MOVES,
    Desk,
    Move,
    events_of,
    look,
    look_at_dead_letters,
    tell,
    tell_failure,
)
from controlplane.endpoints.forms import CreateForm, NarrowForm, ReasonForm
from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.publication import connection
from controlplane.endpoints.slots import Report
from controlplane.errors import DomainError
from controlplane.events.models import Event
from controlplane.registry.admin import VersionPage
from controlplane.registry.models import Version

TEMPLATES = "admin/endpoints/endpoint"
# A page that shows something on its way renews itself.
REFRESH_S = 3
MAX_ROWS = 200


@admin.register(Endpoint)
class EndpointPage(ModelAdmin):
    """Endpoints with their roles. A route changes through services, which write the event with it."""

    list_display = (
        "name", "live", "show_live", "previous", "candidate", "show_share", "generation", "show_published",
        "updated_at",
    )  # fmt: skip
    list_filter = ("store_texts",)
    list_select_related = ("live__model", "previous__model", "candidate__model")
    search_fields = ("name", "live__model__name")
    ordering = ("name",)
    empty_hint = "Applications ask for an endpoint by name; it leads to a version."
    add_fieldsets = (
        (None, {"fields": ("name", "live", "reason")}),
        ("Settings", {"fields": ("queue_cap", "deadline_s", "in_flight", "standby_s", "store_texts")}),
    )  # fmt: skip

    # ------------------------------------------------------------------------------------------- list and creation

    def get_form(
        self, request: HttpRequest, obj: Endpoint | None = None, change: bool = False, **kwargs: Any
    ) -> Any:
        """The form of a new endpoint."""
        return super().get_form(request, obj, change=change, **{**kwargs, "form": CreateForm})

    def get_fieldsets(self, request: HttpRequest, obj: Endpoint | None = None) -> Any:
        """Those of a new endpoint."""
        return self.add_fieldsets

    def has_delete_permission(self, request: HttpRequest, obj: object | None = None) -> bool:
        """Logs and events go on speaking of the row."""
        return False

    def save_model(self, request: HttpRequest, obj: Endpoint, form: Any, change: bool) -> None:
        """Create, and publish at once."""
        created = services.create_and_publish(
            name=obj.name,
            live=obj.live.name,
            settings=form.settings(),
            reason=form.cleaned_data["reason"],
            actor=request.user.get_username(),
            now=timezone.now(),
            queue=connection(),
        )
        obj.pk = created.pk

    def add_view(self, request: HttpRequest, *_: Any, **__: Any) -> HttpResponse:
        """The form; what a service refuses is told as well."""
        shown = {"show_save_and_add_another": False, "show_save_and_continue": False}
        try:
            response: HttpResponse = super().add_view(request, extra_context=shown)
        except DomainError as error:
            self.message_user(request, error.message, messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())
        return response

    def response_add(self, request: HttpRequest, obj: Endpoint, *args: Any) -> HttpResponse:
        """On to the page where its version can be watched while it loads."""
        self.message_user(request, f"Endpoint {obj.name} is created; a slot loads {obj.live.name}.")
        return _to(obj)

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """The list, with one look at the slots for all rows."""
        page = super().get_changelist_instance(request)
        report = look()
        for endpoint in page.result_list:
            endpoint.report = report
        return page

    @display(
        description="answers",
        label={"ready": "success", "not ready": "danger", "unknown": "warning"},
    )
    def show_live(self, endpoint: Any) -> str:
        """Whether a slot holds the live version ready."""
        report: Report | None = endpoint.report
        if report is None:
            return "unknown"
        return (
            "ready" if endpoint.live.name in report.ready_versions(endpoint.name) else "not ready"
        )

    @admin.display(description="share of the candidate", ordering="canary_bp")
    def show_share(self, endpoint: Endpoint) -> str:
        """In per cent."""
        return f"{endpoint.canary_bp / 100:g} %" if endpoint.candidate else "-"

    @display(description="published", boolean=True)
    def show_published(self, endpoint: Endpoint) -> bool:
        """Whether Redis confirmed the newest generation."""
        return endpoint.is_published

    # --------------------------------------------------------------------------------------- one endpoint, its moves

    def get_urls(self) -> list[Any]:
        """The moves of an endpoint and the list of slots, before the addresses that take any id."""
        moves = [
            path(
                f"<int:pk>/{move.name}/",
                self.admin_site.admin_view(self._view_of(move)),
                name=f"endpoints_endpoint_{move.name}",
            )
            for move in MOVES
        ]
        reason = path(
            "<int:pk>/reason/<int:sequence>/",
            self.admin_site.admin_view(self.reason_view),
            name="endpoints_endpoint_reason",
        )
        lists = [
            path(f"{name}/", self.admin_site.admin_view(view), name=f"endpoints_{name}")
            for name, view in (("slots", self.slots_view), ("dead-letters", self.dead_letters_view))
        ]
        return [*moves, reason, *lists, *super().get_urls()]

    def change_view(
        self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """How the endpoint fares, what was done to it, and the buttons."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(status=405)
        desk = self._desk(object_id)
        context = {
            "desk": desk,
            "endpoint": desk.endpoint,
            "roles": desk.roles,
            "percent": f"{desk.endpoint.canary_bp / 100:g}",
            "events": events_of(desk.endpoint),
            "may_change": self.has_change_permission(request),
        }
        response = self._page(request, "overview", f"Endpoint {desk.endpoint.name}", context)
        if not desk.is_settled:
            # A message that was just given is to be read, too.
            response["Refresh"] = str(REFRESH_S * (4 if "done" in request.GET else 1))
        return response

    def reason_view(self, request: HttpRequest, pk: int, sequence: int) -> HttpResponse:
        """Say afterwards why something was done."""
        desk = self._desk(pk)
        self._check_change(request)
        event = Event.objects.about(f"endpoint:{desk.endpoint.name}").filter(sequence=sequence)
        form = ReasonForm(request.POST or None)
        if request.method == "POST" and form.is_valid():
            return self._act(
                request,
                desk.endpoint,
                lambda: services.annotate(
                    name=desk.endpoint.name,
                    sequence=sequence,
                    reason=form.cleaned_data["reason"],
                    actor=request.user.get_username(),
                    now=timezone.now(),
                ),
                lambda _: "The reason is noted.",
            )
        context = {"form": form, "desk": desk, "event": event.first(), "button": "Note the reason"}
        return self._page(request, "reason", "Why was it done?", context)

    def slots_view(self, request: HttpRequest) -> HttpResponse:
        """Every slot, and what it holds."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        report = look()
        form = NarrowForm(
            request.GET,
            rows=report.slots if report else (),
            choose=("endpoint", "version", "state"),
        )
        is_narrowing = "narrow" in request.GET
        context = {
            "report": report,
            "failures": [(each, tell_failure(each)) for each in report.failures] if report else [],
            "slots": form.narrow(("slot", "endpoint", "version", "state", "role", "detail")),
            "form": form,
            "is_narrowing": is_narrowing,
        }
        response = self._page(request, "slots", "Slots", context)
        if not is_narrowing:
            # Whoever fills in the form would lose what they typed.
            response["Refresh"] = str(REFRESH_S)
        return response

    def dead_letters_view(self, request: HttpRequest) -> HttpResponse:
        """Requests that were given up, the newest first."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        letters = look_at_dead_letters()
        form = NarrowForm(request.GET, rows=letters or (), choose=("endpoint", "version"))
        found = form.narrow(("request_id", "endpoint", "version", "arm"))
        rows = [
            {"letter": letter, "at": datetime.fromtimestamp(letter.at_ms / 1000, tz=UTC)}
            for letter in found[:MAX_ROWS]
        ]
        context = {
            "form": form,
            "is_known": letters is not None,
            "rows": rows,
            "num_more": len(found) - len(rows),
        }
        return self._page(request, "dead_letters", "Dead letters", context)

    def _view_of(self, move: Move) -> Callable[..., HttpResponse]:
        """A form that is shown, and acts when it is sent."""

        def view(request: HttpRequest, pk: int) -> HttpResponse:
            desk = self._desk(pk)
            self._check_change(request)
            form = move.form(desk, request.POST if request.method == "POST" else None)
            if request.method == "POST" and form.is_valid():
                return self._act(
                    request,
                    desk.endpoint,
                    lambda: move.act(desk, form, request.user.get_username()),
                    tell,
                )
            context = {"form": form, "desk": desk, "move": move, "button": move.button}
            return self._page(request, move.template, move.title, context)

        return view

    def _act(
        self,
        request: HttpRequest,
        endpoint: Endpoint,
        act: Callable[[], Any],
        say: Callable[[Any], str],
    ) -> HttpResponse:
        """Do it, and show on the endpoint's page what became of it."""
        try:
            done = act()
        except DomainError as error:
            self.message_user(request, error.message, messages.ERROR)
        else:
            self.message_user(request, say(done), messages.SUCCESS)
        return _to(endpoint)

    def _desk(self, pk: Any) -> Desk:
        found = Endpoint.objects.with_versions().filter(pk=pk) if str(pk).isdecimal() else None
        endpoint = found.first() if found is not None else None
        if endpoint is None:
            raise Http404(f"There is no endpoint {pk}.")
        return Desk(endpoint, look([endpoint.name]))

    def _check_change(self, request: HttpRequest) -> None:
        if not self.has_change_permission(request):
            raise PermissionDenied

    def _page(
        self, request: HttpRequest, template: str, title: str, context: dict[str, Any]
    ) -> HttpResponse:
        shared = {**self.admin_site.each_context(request), "title": title}
        if "desk" in context:
            # The way back, above the page.
            shared |= {"opts": self.opts, "original": context["desk"].endpoint}
        return TemplateResponse(request, f"{TEMPLATES}/{template}.html", {**shared, **context})


admin.site.unregister(Version)


@admin.register(Version)
class PlacedVersionPage(VersionPage):
    """A version as the registry shows it, and how it fares in the slots, which the registry knows nothing of."""

    fieldsets = (
        VersionPage.fieldsets[0],
        ("In the slots", {"fields": ("show_slots", "show_failures")}),
        *VersionPage.fieldsets[1:],
    )

    @admin.display(description="held by")
    def show_slots(self, version: Version) -> str:
        """The slots that hold it, or are about to."""
        if (report := look()) is None:
            return "Redis is away, so nobody knows."
        lines = (
            (f"{each.slot} for {each.endpoint}: {each.state}",)
            for each in report.holders_of(version.name)
        )
        return format_html_join(mark_safe("<br>"), "{}", lines) or "No slot."

    @admin.display(description="could not be loaded")
    def show_failures(self, version: Version) -> str:
        """Why, when, by which slot, and when the next try is due."""
        if (report := look()) is None:
            return "Redis is away, so nobody knows."
        lines = ((tell_failure(each),) for each in report.failures_of(version.name))
        return format_html_join(mark_safe("<br>"), "{}", lines) or "-"


def _to(endpoint: Endpoint) -> HttpResponseRedirect:
    address = reverse("admin:endpoints_endpoint_change", args=[endpoint.pk])
    return HttpResponseRedirect(f"{address}?done")
