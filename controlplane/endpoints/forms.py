"""What people decide about an endpoint in the admin; shape only, the services know what may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django import forms
from django.core.validators import MaxValueValidator, MinValueValidator
from unfold.widgets import (
    UnfoldAdminDecimalFieldWidget,
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from controlplane.endpoints.models import MAX_BP, MAX_DEADLINE_S, MAX_STANDBY_S, Endpoint
from controlplane.endpoints.moves import Settings
from controlplane.endpoints.slots import RoleReadiness
from controlplane.registry.models import Version

MAX_CHOICES = 200
REASON = "Stands in the event log with your name."


def reason_field(*, required: bool) -> forms.CharField:
    """Why."""
    return forms.CharField(
        required=required, max_length=500, widget=UnfoldAdminTextInputWidget, help_text=REASON
    )


class NarrowForm(forms.Form):
    """What a list of rows from Redis is narrowed to: some of their fields to be chosen from, and a text to be found."""

    q = forms.CharField(required=False, label="Search", widget=UnfoldAdminTextInputWidget)

    def __init__(self, data: Any, *, rows: Sequence[Any], choose: Sequence[str]) -> None:
        super().__init__(data)
        self._rows, self._choose = rows, choose
        for name in choose:
            values = sorted({str(getattr(row, name)) for row in rows} - {""})
            # What was chosen stays to be seen when no row has it any more.
            chosen = [value for value in [data.get(name, "")] if value and value not in values]
            choices = [("", "all"), *((value, value) for value in (*values, *chosen))]
            self.fields[name] = forms.ChoiceField(
                required=False, choices=choices, widget=UnfoldAdminSelectWidget
            )

    @property
    def wanted(self) -> dict[str, str]:
        """What is narrowed by."""
        values = self.cleaned_data if self.is_valid() else {}
        return {name: value for name, value in values.items() if value}

    def narrow(self, searched: Sequence[str]) -> list[Any]:
        """The rows that fit; the text is looked for in the fields ``searched``, whatever its case."""
        wanted = self.wanted
        text = wanted.pop("q", "").casefold()
        return [
            row
            for row in self._rows
            if all(str(getattr(row, name)) == value for name, value in wanted.items())
            and any(text in str(getattr(row, name)).casefold() for name in searched)
        ]


class MoveForm(forms.Form):
    """A move from the state that the page showed; somebody else's move in between refuses it."""

    expected_generation = forms.IntegerField(widget=forms.HiddenInput)

    def __init__(self, *args: Any, endpoint: Endpoint, roles: list[RoleReadiness], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.endpoint, self.roles = endpoint, roles
        self.fields["expected_generation"].initial = endpoint.generation


class PromoteForm(MoveForm):
    """Which of the versions that are ready goes live."""

    version = forms.ChoiceField(widget=UnfoldAdminSelectWidget)
    reason = reason_field(required=True)

    def __init__(self, *args: Any, ready: Iterable[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = {role.version: role.role for role in self.roles}
        version: Any = self.fields["version"]
        version.choices = [
            (name, f"{name} ({names.get(name, 'no role')}, ready)")
            for name in sorted(ready)
            if name != self.endpoint.live.name
        ]
        version.help_text = "Only versions that a slot holds ready can go live."

    @property
    def has_choices(self) -> bool:
        """Whether there is anything to promote."""
        version: Any = self.fields["version"]
        return bool(version.choices)


class CandidateForm(MoveForm):
    """Which version slots load beside the live one, and how much of the traffic it is given."""

    candidate = forms.ChoiceField(required=False, widget=UnfoldAdminSelectWidget)
    percent = forms.DecimalField(
        label="Share of the traffic in per cent",
        max_digits=5,
        decimal_places=2,
        validators=[MinValueValidator(0), MaxValueValidator(100)],
        widget=UnfoldAdminDecimalFieldWidget,
        help_text="0: it is loaded and warmed, and answers nobody. The same users always meet the same version.",
    )
    reason = reason_field(required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        versions = Version.objects.ready().select_related("model").order_by("-pk")
        names = [
            version.name for version in versions.exclude(pk=self.endpoint.live_id)[:MAX_CHOICES]
        ]
        candidate = self.endpoint.candidate
        choices = [("", "no candidate"), *((name, name) for name in names)]
        field: Any = self.fields["candidate"]
        field.choices = choices
        field.initial = candidate.name if candidate else ""
        self.fields["percent"].initial = f"{self.endpoint.canary_bp * 100 / MAX_BP:g}"

    def clean(self) -> dict[str, Any]:
        """The share in basis points."""
        data = super().clean() or {}
        if "percent" in data:
            data["canary_bp"] = int(data["percent"] * MAX_BP / 100)
        if data.get("canary_bp") and not data.get("candidate"):
            self.add_error("percent", "Choose a candidate that takes the share, or 0.")
        return data


class SettingsForm(MoveForm):
    """What is set on an endpoint beside its versions."""

    queue_cap = forms.IntegerField(
        min_value=1,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text="How many requests may wait for one version; more are refused with 429.",
    )
    deadline_s = forms.FloatField(
        label="Deadline in seconds",
        min_value=1,
        max_value=MAX_DEADLINE_S,
        widget=UnfoldAdminDecimalFieldWidget,
        help_text="A request that is not answered by then ends with an error.",
    )
    in_flight = forms.ChoiceField(
        label="Requests in flight at a rollback",
        choices=Endpoint.InFlight,
        widget=UnfoldAdminSelectWidget,
    )
    standby_s = forms.IntegerField(
        label="Standby in seconds",
        min_value=1,
        max_value=MAX_STANDBY_S,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text="How long a version that was rolled back or replaced stays in a slot.",
    )
    store_texts = forms.BooleanField(
        label="Store texts",
        required=False,
        widget=UnfoldBooleanSwitchWidget,
        help_text="Keep prompts and answers in the request log for a few days.",
    )
    reason = reason_field(required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in Settings.__dataclass_fields__:
            self.fields[name].initial = getattr(self.endpoint, name)

    def settings(self) -> Settings:
        """As the service takes them."""
        return Settings(**{name: self.cleaned_data[name] for name in Settings.__dataclass_fields__})


class RollbackForm(forms.Form):
    """Which version is left: the one that the page showed, however often the button is pressed."""

    leave = forms.CharField(widget=forms.HiddenInput)
    force = forms.BooleanField(required=False, widget=forms.HiddenInput)


class ReasonForm(forms.Form):
    """The reason for a change that was made in a hurry."""

    reason = reason_field(required=True)


class CreateForm(forms.ModelForm):
    """A new endpoint."""

    reason = reason_field(required=False)

    class Meta:
        model = Endpoint
        fields = (
            "name", "live", "queue_cap", "deadline_s", "in_flight", "standby_s", "store_texts",
        )  # fmt: skip
        labels = {
            "live": "Live version",
            "deadline_s": "Deadline in seconds",
            "in_flight": "Requests in flight at a rollback",
            "standby_s": "Standby in seconds",
        }
        help_texts = {
            "name": "What applications put into model=.",
            "live": "Only versions whose import is done.",
            "queue_cap": "How many requests may wait for one version; more are refused with 429.",
            "deadline_s": "A request that is not answered by then ends with an error.",
            "standby_s": "How long a version that was rolled back or replaced stays in a slot.",
            "store_texts": "Keep prompts and answers in the request log for a few days.",
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        live: Any = self.fields["live"]
        live.queryset = Version.objects.ready().select_related("model").order_by("-pk")

    def settings(self) -> Settings:
        """As the service takes them."""
        return Settings(**{name: self.cleaned_data[name] for name in Settings.__dataclass_fields__})
