"""What people decide about a rollout in the admin; shape only, the services know what may be."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.validators import MaxValueValidator, MinValueValidator
from unfold.widgets import (
    UnfoldAdminDecimalFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldBooleanSwitchWidget,
)

from controlplane.endpoints.forms import MAX_CHOICES, reason_field
from controlplane.endpoints.models import MAX_BP, Endpoint
from controlplane.registry.models import Version
from controlplane.rollouts.models import Policy, Rollout
from controlplane.rollouts.policy import parse_policy
from controlplane.rollouts.presets import PRESETS
from controlplane.rollouts.steps import describe_step, largest_bp


class StartForm(forms.Form):
    """Which version is to earn its traffic, and by which policy."""

    candidate = forms.ChoiceField(widget=UnfoldAdminSelectWidget)
    policy = forms.ChoiceField(widget=UnfoldAdminSelectWidget)
    takes_rejected = forms.BooleanField(
        label="Try a version again that was rolled back here",
        required=False,
        widget=UnfoldBooleanSwitchWidget,
        help_text="Needed for versions that are marked as rejected, with a reason.",
    )
    reason = reason_field(required=False)

    def __init__(self, *args: Any, endpoint: Endpoint, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rejected = {each.version.name for each in endpoint.rejections.all()}
        names = _ready_versions(endpoint)
        candidate: Any = self.fields["candidate"]
        candidate.choices = [
            (name, f"{name} (rejected here)" if name in rejected else name) for name in names
        ]
        if endpoint.candidate is not None and endpoint.candidate.name in names:
            candidate.initial = endpoint.candidate.name
        policy: Any = self.fields["policy"]
        policy.choices = [(name, name) for name in sorted(policies_by_name())]
        policy.initial = next(iter(PRESETS))

    @property
    def has_choices(self) -> bool:
        """Whether there is anything to roll out."""
        candidate: Any = self.fields["candidate"]
        return bool(candidate.choices)


class ReasonForm(forms.Form):
    """Why, if somebody wants to say."""

    reason = reason_field(required=False)


class NeededReasonForm(forms.Form):
    """Why; it overrules something."""

    reason = reason_field(required=True)


class RollbackForm(forms.Form):
    """Whether to go back to an incumbent that is not ready: the page that is pressed has said so."""

    force = forms.BooleanField(required=False, widget=forms.HiddenInput)
    reason = reason_field(required=False)


class WeightForm(forms.Form):
    """The share of the candidate until the next step."""

    percent = forms.DecimalField(
        label="Share of the traffic in per cent",
        max_digits=5,
        decimal_places=2,
        widget=UnfoldAdminDecimalFieldWidget,
    )
    reason = reason_field(required=False)

    def __init__(self, *args: Any, rollout: Rollout, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        allowed = (
            largest_bp(parse_policy(rollout.document).steps, rollout.step_index) * 100 / MAX_BP
        )
        percent = self.fields["percent"]
        percent.validators += [MinValueValidator(0), MaxValueValidator(allowed)]
        percent.initial = f"{rollout.canary_bp * 100 / MAX_BP:g}"
        percent.help_text = f"At most {allowed:g} %, which the steps reached so far have decided on. The next step sets its own."

    def clean(self) -> dict[str, Any]:
        """The share in basis points."""
        data = super().clean() or {}
        if "percent" in data:
            data["canary_bp"] = int(data["percent"] * MAX_BP / 100)
        return data


def policies_by_name() -> dict[str, list[str]]:
    """Every policy that a rollout may name, with the steps of its newest version in words; presets are always there."""
    found: dict[str, dict[str, Any]] = dict(PRESETS)
    for policy in Policy.objects.order_by("version"):
        found[policy.name] = policy.document
    return {
        name: [describe_step(step) for step in parse_policy(document).steps]
        for name, document in found.items()
    }


def _ready_versions(endpoint: Endpoint) -> list[str]:
    versions = Version.objects.ready().select_related("model").order_by("-pk")
    return [version.name for version in versions.exclude(pk=endpoint.live_id)[:MAX_CHOICES]]
