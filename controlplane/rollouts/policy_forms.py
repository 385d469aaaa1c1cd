"""The fields and rows in which a policy is edited; what is empty says nothing, and the service knows what may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from django import forms
from django.core.exceptions import ValidationError
from django.forms import BaseFormSet, formset_factory
from unfold.widgets import (
    UnfoldAdminSelectWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from controlplane.endpoints.models import Endpoint
from controlplane.registry.models import validate_slug
from controlplane.rollouts.policy import MODES, SCORE, Kind
from controlplane.rollouts.steps import Kind as StepKind
from controlplane.rollouts.steps import Until

NONE = "none"


class Number(forms.CharField):
    """A number as it was typed: a whole one stays whole, and none is no value."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            required=False, widget=UnfoldAdminTextInputWidget({"inputmode": "decimal"}), **kwargs
        )

    def clean(self, value: Any) -> int | float | None:
        """None for nothing.

        Raises:
            ValidationError: it is no number.
        """
        text = str(super().clean(value)).strip()
        if not text:
            return None
        try:
            return int(text) if text.lstrip("+-").isdecimal() else float(text)
        except ValueError:
            raise ValidationError(f"{text!r} is no number.") from None


class Names(forms.CharField):
    """Names with commas between them. Nothing is no value, and ``none`` an empty list."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(required=False, widget=UnfoldAdminTextInputWidget, **kwargs)

    def prepare_value(self, value: Any) -> Any:
        """A list as it is typed."""
        return ", ".join(value) or NONE if isinstance(value, list | tuple) else value

    def clean(self, value: Any) -> list[str] | None:
        """None for nothing."""
        names = [name.strip() for name in str(super().clean(value)).split(",") if name.strip()]
        return None if not names else [] if names == [NONE] else names


class SegmentField(forms.CharField):
    """``lang=hi, topic=refund``; nothing is all traffic."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(required=False, widget=UnfoldAdminTextInputWidget, **kwargs)

    def prepare_value(self, value: Any) -> Any:
        """A segment as it is typed."""
        return (
            ", ".join(f"{key}={each}" for key, each in value.items())
            if isinstance(value, dict)
            else value
        )

    def clean(self, value: Any) -> dict[str, str]:
        """Keys and values.

        Raises:
            ValidationError: a part has no ``=``.
        """
        parts = [part.strip() for part in str(super().clean(value)).split(",") if part.strip()]
        if wrong := [part for part in parts if "=" not in part]:
            raise ValidationError(f"{wrong[0]!r} must be key=value.")
        return dict(part.split("=", 1) for part in parts)


def _choose(values: Iterable[str], nothing: str = "", **kwargs: Any) -> forms.ChoiceField:
    choices = [("", nothing), *((str(value), str(value).replace("_", " ")) for value in values)]
    return forms.ChoiceField(
        required=False, choices=choices, widget=UnfoldAdminSelectWidget, **kwargs
    )


class Row(forms.Form):
    """A row whose ``seldom`` fields are folded away until one of them says something, or is complained of."""

    seldom: tuple[str, ...] = ()

    def often_used(self) -> list[Any]:
        """The fields that are always to be seen."""
        return [field for field in self if field.name not in self.seldom]

    def seldom_used(self) -> list[Any]:
        """The fields behind the fold."""
        return [self[name] for name in self.seldom]

    def is_unfolded(self) -> bool:
        """Whether there is something to be seen behind the fold."""
        return any(
            field.errors or field.value() not in (None, "", False) for field in self.seldom_used()
        )


class Head(Row):
    """What a policy is called, and what holds for all of its steps."""

    seldom = (
        "alpha", "segment_minimum", "crossings", "min_coverage", "users_once_per_block", "in_flight", "standby_s",
        "prepare_s", "deadline_s",
    )  # fmt: skip
    name = forms.CharField(
        max_length=64, validators=[validate_slug], widget=UnfoldAdminTextInputWidget,
        help_text="A name that is there gets its next version.",
    )  # fmt: skip
    description = forms.CharField(
        required=False, max_length=2000, widget=UnfoldAdminTextInputWidget
    )
    alpha = Number(help_text="Risk of a false rollback, and of a false pass. 0.05")
    block_s = Number(label="Time block (s)", help_text="In which arms are compared. 900")
    segment_keys = Names(
        label="Segment keys", help_text="lang, topic, tenant; also length_band, tags.NAME"
    )
    crossings = forms.CharField(
        required=False, widget=UnfoldAdminTextInputWidget, help_text="lang+topic, lang+tenant"
    )
    segment_minimum = Number(
        label="Smallest segment", help_text="Requests that a value needs to be judged. 100"
    )
    min_coverage = Number(label="Least coverage", help_text="Below it nothing passes. 0.5")
    users_once_per_block = forms.BooleanField(
        label="A user counts once a block, not once a rollout",
        required=False,
        widget=UnfoldBooleanSwitchWidget,
    )
    promote = _choose(
        ("yes", "no"), "if there is a canary step", help_text="Whether a pass makes it live."
    )
    in_flight = _choose(
        Endpoint.InFlight.values, "as the endpoint has it", label="In flight at a rollback",
        help_text="How requests end that the candidate is answering.",
    )  # fmt: skip
    standby_s = Number(
        label="Standby (s)",
        help_text="How long a candidate taken back stays. As the endpoint has it",
    )
    prepare_s = Number(label="Time to get ready (s)", help_text="900")
    deadline_s = Number(label="Deadline of all (s)", help_text="1209600: two weeks")


class StepRow(Row):
    """One step; what its kind does not know stays empty."""

    seldom = ("self_share", "deadline_s", "max_failure_rate")
    type = _choose(StepKind, label="Step")
    share = Number(help_text="0 to 1, of requests")
    self_share = Number(label="A/A share", help_text="answered twice")
    bp = Number(label="Basis points", help_text="of 10,000 requests")
    floor = Number(help_text="observations")
    until = _choose(Until, help_text="pass, or the floor")
    for_s = Number(label="At least (s)")
    deadline_s = Number(label="Deadline (s)", help_text="a week")
    max_failure_rate = Number(label="Failures allowed", help_text="while live")


class MetricRow(Row):
    """One gate; what its kind does not know stays empty."""

    seldom = (
        "overall_margin", "minimum", "segments", "field", "quantile", "slack", "limit_ms", "segment_minimum",
        "not_critical",
    )  # fmt: skip
    name = forms.CharField(required=False, max_length=64, widget=UnfoldAdminTextInputWidget)
    kind = _choose(Kind)
    tolerance = Number(help_text="worse is a fail")
    margin = Number(help_text="no worse is a pass")
    overall_margin = Number(label="Margin overall")
    minimum = Number(help_text="observations")
    modes = Names(label="Measured on", help_text=", ".join((SCORE, *MODES)))
    segments = Names(help_text="keys; none: all traffic")
    flags = Names(help_text="empty: any; none: failures")
    field = forms.CharField(
        required=False, widget=UnfoldAdminTextInputWidget, help_text="of score and cost"
    )
    quantile = Number(help_text="of latency")
    slack = Number(help_text="of latency")
    limit_ms = Number(label="Limit (ms)", help_text="of latency")
    segment_minimum = Number(label="Large segment", help_text="of latency")
    not_critical = forms.BooleanField(
        label="A failure holds the rollout, and does not roll back", required=False,
        widget=UnfoldBooleanSwitchWidget,
    )  # fmt: skip


class TrafficRow(Row):
    """What the endpoint is expected to bring on one segment."""

    segment = SegmentField(help_text="lang=hi; empty: all traffic")
    per_hour = Number(label="Requests per hour")
    loss_rate = Number(label="Losses now", help_text="0 to 1")


class Rows(BaseFormSet):
    """Rows in the order of their numbers; one without any value is not there, and one may be taken out."""

    def add_fields(self, form: Any, index: int | None) -> None:
        """With the looks of the other fields."""
        super().add_fields(form, index)
        form.fields["DELETE"].label = "Take out"
        form.fields["DELETE"].widget = UnfoldBooleanSwitchWidget()
        if "ORDER" in form.fields:
            form.fields["ORDER"].widget = UnfoldAdminTextInputWidget({"inputmode": "numeric"})

    def filled(self) -> list[forms.Form]:
        """The rows that count."""
        rows = [
            row
            for row in self.forms
            if row.is_valid() and not row.cleaned_data.get("DELETE") and values_of(row)
        ]
        return sorted(rows, key=lambda row: row.cleaned_data.get("ORDER") or len(self.forms) + 1)


def _rows_of(form: type[forms.Form], *, can_order: bool = False) -> type[Rows]:
    made = formset_factory(
        form, formset=Rows, extra=1, can_delete=True, can_order=can_order, max_num=50
    )
    return cast(type[Rows], made)


STEPS, METRICS, TRAFFIC = (
    _rows_of(StepRow, can_order=True),
    _rows_of(MetricRow),
    _rows_of(TrafficRow),
)


def values_of(row: forms.Form) -> dict[str, Any]:
    """The fields of a row that say something."""
    return {
        name: value
        for name, value in row.cleaned_data.items()
        if name not in ("ORDER", "DELETE") and not _says_nothing(value)
    }


def _says_nothing(value: Any) -> bool:
    # 0 says something, and so does an empty list.
    return value is None or value is False or value in ("", {})
