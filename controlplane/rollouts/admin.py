"""Rollouts in the admin: how far each is and why, its numbers, its buttons; and where one is started."""

# Django fixes the signatures of these methods, used or not.
# ruff: noqa: ARG002
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils import timezone
from unfold.admin import ModelAdmin
from unfold.contrib.filters.admin import DropdownFilter, RelatedDropdownFilter
from unfold.decorators import display

from controlplane.endpoints.admin import EndpointPage
from controlplane.endpoints.forms import ReasonForm
from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.publication import connection
from controlplane.errors import DomainError
from controlplane.events.models import Event
from controlplane.rollouts import services
from controlplane.rollouts.desk import (
    DANGER,
    MOVES,
    PRIMARY,
    Desk,
    Move,
    active_rollout_of,
    look_at_slots,
    overview_of,
    tell,
)
from controlplane.rollouts.forms import StartForm, policies_by_name
from controlplane.rollouts.machine import State
from controlplane.rollouts.models import Policy, Rollout, RolloutQuerySet
from controlplane.rollouts.policy_page import PolicyPage
from controlplane.rollouts.timeline import annotate
from controlplane.rollouts.words import state_chip, verdict_chip

TEMPLATES = "admin/rollouts/rollout"
NUM_ROLLOUTS = 5

admin.site.register(Policy, PolicyPage)


class StateFilter(DropdownFilter):
    """Where rollouts stand."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: object) -> list[tuple[str, str]]:
        """Those that run, and each state."""
        return [("active", "active"), *((state, state.replace("_", " ")) for state in State)]

    def queryset(self, request: HttpRequest, rows: QuerySet[Rollout]) -> QuerySet[Rollout]:
        """Rollouts that stand there."""
        if self.value() == "active":
            return rows.filter(pk__in=RolloutQuerySet(Rollout).active().values("pk"))
        return rows.filter(state=self.value()) if self.value() else rows


@admin.register(Rollout)
class RolloutPage(ModelAdmin):
    """Rollouts, the newest first. They change through services, which write the event with it."""

    list_display = (
        "key", "endpoint", "candidate", "show_state", "show_step", "show_verdict", "show_share", "created_at", "why",
    )  # fmt: skip
    list_filter = (StateFilter, ("endpoint", RelatedDropdownFilter))
    list_filter_submit = True
    list_select_related = ("endpoint", "candidate__model", "incumbent__model", "policy")
    search_fields = ("key", "endpoint__name", "candidate__model__name", "created_by", "reason")
    ordering = ("-id",)
    empty_hint = "A rollout is started on the page of an endpoint."

    # ---------------------------------------------------------------------------------------------------------- list

    def has_add_permission(self, request: HttpRequest) -> bool:
        """They are started on the page of an endpoint."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object | None = None) -> bool:
        """Events go on speaking of the row."""
        return False

    @display(
        description="state",
        label={variant: variant for variant in ("info", "success", "warning", "danger")},
    )
    def show_state(self, rollout: Rollout) -> tuple[str, str]:
        """In words, with a symbol."""
        chip = state_chip(rollout.state)
        return chip.variant, chip.text

    @display(
        description="gates",
        label={variant: variant for variant in ("info", "success", "warning", "danger")},
    )
    def show_verdict(self, rollout: Rollout) -> tuple[str, str]:
        """In words, with a symbol."""
        chip = verdict_chip(rollout.verdict)
        return chip.variant, chip.text

    @admin.display(description="step")
    def show_step(self, rollout: Rollout) -> str:
        """Which of how many."""
        total = len(rollout.document.get("steps", ()))
        return f"{min(rollout.step_index + 1, total)}/{total}"

    @admin.display(description="share", ordering="canary_bp")
    def show_share(self, rollout: Rollout) -> str:
        """Of the traffic, in per cent."""
        return f"{rollout.canary_bp / 100:g} %"

    # --------------------------------------------------------------------------------------------------- one rollout

    def get_urls(self) -> list[Any]:
        """The moves of a rollout, before the addresses that take any id."""
        moves = [
            path(
                f"<int:pk>/{move.name}/",
                self.admin_site.admin_view(self._view_of(move)),
                name=f"rollouts_rollout_{move.name}",
            )
            for move in MOVES
        ]
        reason = path(
            "<int:pk>/reason/<int:sequence>/",
            self.admin_site.admin_view(self.reason_view),
            name="rollouts_rollout_reason",
        )
        return [*moves, reason, *super().get_urls()]

    def change_view(
        self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """How far the rollout is, what its gates say, what was done to it, and the buttons."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(status=405)
        desk = self._desk(request, object_id)
        may_change = self.has_change_permission(request)
        context = {
            **overview_of(desk, timezone.now()),
            "may_change": may_change,
            "moves": desk.moves if may_change else [],
        }
        return self._page(request, "overview", f"Rollout {desk.rollout.key}", desk, context)

    def reason_view(self, request: HttpRequest, pk: int, sequence: int) -> HttpResponse:
        """Say afterwards why something was done."""
        desk = self._desk(request, pk)
        self._check_change(request)
        event = Event.objects.about(desk.rollout.subject).filter(sequence=sequence).first()
        form = ReasonForm(request.POST or None)
        if request.method == "POST" and form.is_valid():
            return self._act(
                request,
                desk,
                lambda: annotate(
                    rollout=desk.rollout,
                    sequence=sequence,
                    reason=form.cleaned_data["reason"],
                    actor=desk.actor,
                    now=timezone.now(),
                ),
                lambda _: ("The reason is noted.", desk.rollout),
            )
        context = {"form": form, "event": event, "button": "Note the reason"}
        return self._page(request, "reason", "Why was it done?", desk, context)

    def _view_of(self, move: Move) -> Callable[..., HttpResponse]:
        """A form that is shown, and acts when it is sent."""

        def view(request: HttpRequest, pk: int) -> HttpResponse:
            desk = self._desk(request, pk)
            self._check_change(request)
            form = move.form(desk, request.POST if request.method == "POST" else None)
            if request.method == "POST" and form.is_valid():
                return self._act(
                    request,
                    desk,
                    lambda: move.act(desk, form.cleaned_data),
                    lambda rollout: (tell(rollout), rollout),
                )
            variant = DANGER if move.variant == DANGER else PRIMARY
            context = {"form": form, "move": move, "button": move.button, "variant": variant}
            return self._page(request, "act", move.button, desk, context)

        return view

    def _act(
        self,
        request: HttpRequest,
        desk: Desk,
        act: Callable[[], Any],
        say: Callable[[Any], tuple[str, Rollout]],
    ) -> HttpResponse:
        """Do it, and show on the page of the rollout what became of it."""
        rollout = desk.rollout
        try:
            told, rollout = say(act())
        except DomainError as error:
            self.message_user(request, error.message, messages.ERROR)
        else:
            self.message_user(request, told, messages.SUCCESS)
        return to_rollout(rollout)

    def _desk(self, request: HttpRequest, pk: Any) -> Desk:
        found = Rollout.objects.with_names().filter(pk=pk) if str(pk).isdecimal() else None
        rollout = found.first() if found is not None else None
        if rollout is None:
            raise Http404(f"There is no rollout {pk}.")
        return Desk(rollout, request.user, look_at_slots())

    def _check_change(self, request: HttpRequest) -> None:
        if not self.has_change_permission(request):
            raise PermissionDenied

    def _page(
        self, request: HttpRequest, template: str, title: str, desk: Desk, context: dict[str, Any]
    ) -> HttpResponse:
        shared = {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "original": desk.rollout,
            "desk": desk,
            "rollout": desk.rollout,
        }
        return TemplateResponse(request, f"{TEMPLATES}/{template}.html", {**shared, **context})


admin.site.unregister(Endpoint)


@admin.register(Endpoint)
class RolloutsOfEndpoint(EndpointPage):
    """An endpoint as its own app shows it, and its rollouts, which that app knows nothing of."""

    def get_urls(self) -> list[Any]:
        """With the form that starts a rollout."""
        start = path(
            "<int:pk>/rollout/",
            self.admin_site.admin_view(self.start_view),
            name="endpoints_endpoint_rollout",
        )
        return [start, *super().get_urls()]

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> Any:
        """With the rollout that decides about the candidate, those before it, and the button that starts one."""
        response = super().change_view(request, object_id, *args, **kwargs)
        if isinstance(response, TemplateResponse) and response.context_data is not None:
            endpoint = response.context_data["endpoint"]
            rollouts = Rollout.objects.with_names().of_endpoint(endpoint.name).newest_first()
            response.template_name = "admin/rollouts/endpoint/overview.html"
            response.context_data |= {
                "rollouts": [(each, state_chip(each.state)) for each in rollouts[:NUM_ROLLOUTS]],
                "active": active_rollout_of(endpoint),
                "may_start": self._may_start(request),
            }
        return response

    def start_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """The form that starts a rollout; what the service refuses is told above it."""
        desk = self._desk(pk)
        if not self._may_start(request):
            raise PermissionDenied
        form = StartForm(request.POST if request.method == "POST" else None, endpoint=desk.endpoint)
        if request.method == "POST" and form.is_valid():
            try:
                rollout = services.start(
                    **form.cleaned_data,
                    endpoint=desk.endpoint.name,
                    actor=request.user.get_username(),
                    now=timezone.now(),
                    queue=connection(),
                )
            except DomainError as error:
                form.add_error(None, error.message)
            else:
                self.message_user(request, f"Rollout {rollout.key} has begun.", messages.SUCCESS)
                return to_rollout(rollout)
        context = {
            "form": form,
            "desk": desk,
            "policies": policies_by_name(),
            "button": "Start the rollout",
        }
        shared = {
            **self.admin_site.each_context(request),
            "title": "Start a rollout",
            "opts": self.opts,
            "original": desk.endpoint,
        }
        return TemplateResponse(
            request, "admin/rollouts/endpoint/start.html", {**shared, **context}
        )

    def _may_start(self, request: HttpRequest) -> bool:
        return request.user.has_perm("rollouts.add_rollout")


def to_rollout(rollout: Rollout) -> HttpResponseRedirect:
    """The page of a rollout."""
    return HttpResponseRedirect(reverse("admin:rollouts_rollout_change", args=[rollout.pk]))
