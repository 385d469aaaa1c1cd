"""Policies in the admin: each version as it stands, and the form that saves the next one."""

# Django fixes the signatures of these methods, used or not.
# ruff: noqa: ARG002
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from unfold.admin import ModelAdmin

from controlplane.errors import DomainError
from controlplane.events.admin import pretty_json
from controlplane.rollouts.editor import Editor, with_more_rows
from controlplane.rollouts.models import Policy, Rollout
from controlplane.rollouts.policies import save_policy
from controlplane.rollouts.policy import parse_policy
from controlplane.rollouts.presets import CAREFUL, PRESETS
from controlplane.rollouts.steps import describe_step
from controlplane.rollouts.words import duration

TEMPLATES = "admin/rollouts/policy"
MORE = "more"


class PolicyPage(ModelAdmin):
    """Policies in versions that never change."""

    list_display = ("name", "version", "show_steps", "description", "created_at", "created_by")
    search_fields = ("name", "description", "created_by")
    ordering = ("name", "-version")
    empty_hint = "A policy says what a candidate has to show, step by step; begin with a preset."

    def has_delete_permission(self, request: HttpRequest, obj: object | None = None) -> bool:
        """Rollouts and events go on speaking of the row."""
        return False

    def show_steps(self, policy: Policy) -> str:
        """In words."""
        return " → ".join(describe_step(step) for step in parse_policy(policy.document).steps)

    show_steps.short_description = "steps"  # type: ignore[attr-defined]

    def change_view(
        self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """One version, and who uses it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(status=405)
        found = Policy.objects.filter(pk=object_id) if object_id.isdecimal() else None
        policy = found.first() if found is not None else None
        if policy is None:
            raise Http404(f"There is no policy {object_id}.")
        rules = parse_policy(policy.document)
        context = {
            "policy": policy,
            "rules": rules,
            "steps": [
                {
                    "step": step,
                    "words": describe_step(step),
                    "lasts": "" if step.for_s is None else duration(step.for_s),
                    "deadline": duration(step.deadline_s),
                }
                for step in rules.steps
            ],
            "document": pretty_json(policy.document),
            "versions": Policy.objects.newest(policy.name),
            "rollouts": Rollout.objects.with_names().filter(policy=policy).newest_first()[:10],
            "may_change": self.has_add_permission(request),
            "change_url": f"{reverse('admin:rollouts_policy_add')}?from={policy}",
            "original": policy,
        }
        return self._page(request, "overview", f"Policy {policy}", context)

    def add_view(self, request: HttpRequest, *_: Any, **__: Any) -> HttpResponse:
        """The editor, which begins with what ``?from=`` names: a preset, or a version of a policy."""
        if not self.has_add_permission(request):
            raise PermissionDenied
        start = request.GET.get("from", CAREFUL)
        base, name, description = _begin_with(start)
        part = request.POST.get(MORE, "")
        data = with_more_rows(request.POST, part) if part else request.POST
        editor = Editor(
            base,
            data if request.method == "POST" else None,
            name=name,
            description=description,
        )
        is_sent = request.method == "POST" and not part
        if is_sent and editor.is_valid() and (policy := self._save(request, editor)) is not None:
            return HttpResponseRedirect(reverse("admin:rollouts_policy_change", args=[policy.pk]))
        context = {"editor": editor, "start": start, "presets": list(PRESETS), "is_sent": is_sent}
        return self._page(request, "editor", "Policy", context)

    def _save(self, request: HttpRequest, editor: Editor) -> Policy | None:
        """The version that was saved; None where the editor now says what is wrong."""
        head, now = editor.head.cleaned_data, timezone.now()
        try:
            policy = save_policy(
                name=head["name"],
                document=editor.document(),
                description=head["description"],
                actor=request.user.get_username(),
                now=now,
            )
        except DomainError as error:
            editor.blame(error.message)
            return None
        is_new = policy.created_at == now
        told = "is saved" if is_new else "says that already; nothing was saved"
        self.message_user(request, f"Policy {policy} {told}.", messages.SUCCESS)
        return policy

    def _page(
        self, request: HttpRequest, template: str, title: str, context: dict[str, Any]
    ) -> HttpResponse:
        shared = {**self.admin_site.each_context(request), "title": title, "opts": self.opts}
        return TemplateResponse(request, f"{TEMPLATES}/{template}.html", {**shared, **context})


def _begin_with(start: str) -> tuple[Mapping[str, Any], str, str]:
    """The document, name and description that the editor begins with.

    Raises:
        Http404: there is nothing of that name.
    """
    policy = Policy.objects.named(start).first()
    if policy is not None:
        return policy.document, policy.name, policy.description
    if start in PRESETS:
        return PRESETS[start], "", ""
    raise Http404(f"There is no policy {start!r} to begin with.")
