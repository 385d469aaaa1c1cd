"""What is asked of the planner; shape only, the planner knows what may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import forms
from unfold.widgets import (
    UnfoldAdminDecimalFieldWidget,
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from controlplane.registry.models import Version
from controlplane.registry.plans import SIZES
from inference.planner.hardware import DEVICES, THIS_MACHINE, Device
from inference.planner.shape import BITS, KV_FORMATS

MAX_CHOICES = 200
DEFAULTS: dict[str, Any] = {
    "hardware": "a100-40gb",
    "params": "7e9",
    "num_layers": 32,
    "hidden_size": 4096,
    "context": 2048,
    "headroom_percent": 0,
    "prompt_tokens": 512,
    "output_tokens": 128,
    "with_standby": True,
}
OWN = "", "the version's, or fp16"


def _whole(label: str, low: int, help_text: str = "") -> forms.IntegerField:
    return forms.IntegerField(
        label=label,
        required=False,
        min_value=low,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=help_text,
    )


def _number(label: str, help_text: str = "", **limits: Any) -> forms.FloatField:
    widget = UnfoldAdminDecimalFieldWidget(attrs={"step": "any"})
    return forms.FloatField(
        label=label, required=False, widget=widget, help_text=help_text, **limits
    )


def _choice(label: str, choices: Any) -> forms.ChoiceField:
    return forms.ChoiceField(
        label=label, required=False, choices=choices, widget=UnfoldAdminSelectWidget
    )


class PlannerForm(forms.Form):
    """A device, a model by version or by sizes, and the requests that it is to answer."""

    hardware = _choice("Hardware", [])
    version = _choice("Model", [])
    params = forms.FloatField(
        label="Parameters",
        required=False,
        widget=UnfoldAdminTextInputWidget,
        help_text="For instance 7e9. Sizes count where no version is chosen.",
    )
    num_layers = _whole("Layers", 1)
    hidden_size = _whole("Hidden size", 1)
    num_heads = _whole("Query heads", 1, "Empty: 128 wide each.")
    num_kv_heads = _whole("Key heads", 1, "Empty: one for each query head.")
    weights = _choice("Weights", [OWN, *((name, name) for name in BITS)])
    kv = _choice("KV cache", [OWN, *((name, name) for name in KV_FORMATS)])
    context = _whole("Context", 1, "Tokens of a sequence.")
    headroom_percent = _number("Headroom in per cent", "0 to 20.", min_value=0, max_value=20)
    batch = _whole("Batch", 1, "Empty: as many as fit.")
    prompt_tokens = _whole("Prompt tokens", 1)
    output_tokens = _whole("Answer tokens", 1)
    price_per_hour = _number("Price per hour", min_value=0)
    rate = _number("Requests a second", "With both limits: counts replicas.", min_value=0)
    ttft_s = _number("First token within s", "For 99 of 100 requests.", min_value=0)
    tpot_s = _number("Later tokens every s", "On average.", min_value=0)
    with_standby = forms.BooleanField(
        label="Standby beside it", required=False, widget=UnfoldBooleanSwitchWidget
    )

    groups = (
        ("Device and model", ("hardware", "version", "weights", "kv", "context", "headroom_percent", "batch", "with_standby")),
        ("Sizes of the model", ("params", "num_layers", "hidden_size", "num_heads", "num_kv_heads")),
        ("Requests and price", ("prompt_tokens", "output_tokens", "price_per_hour", "rate", "ttft_s", "tpot_s")),
    )  # fmt: skip

    def __init__(self, data: Any, *, machine: Device | None) -> None:
        super().__init__(data if data else DEFAULTS)
        hardware: Any = self.fields["hardware"]
        hardware.choices = [(device.name, device.title) for device in DEVICES.values()]
        if machine is not None:
            hardware.choices = [(THIS_MACHINE, machine.title), *hardware.choices]
        versions = Version.objects.ready().select_related("model").order_by("-pk")[:MAX_CHOICES]
        chosen: Any = self.fields["version"]
        chosen.choices = [
            ("", "by its sizes, below"),
            *((version.name, version.name) for version in versions),
        ]

    def grouped(self) -> Iterator[tuple[str, list[forms.BoundField]]]:
        """Fields under their headings."""
        for title, names in self.groups:
            yield title, [self[name] for name in names]

    def inputs(self) -> dict[str, Any]:
        """As the planner takes them: what was left empty is absent, and a version stands for sizes."""
        given = {
            name: value for name, value in self.cleaned_data.items() if value not in (None, "")
        }
        if "headroom_percent" in given:
            given["headroom"] = given.pop("headroom_percent") / 100
        if given.get("version"):
            given = {name: value for name, value in given.items() if name not in SIZES}
        return given

    def blame(self, name: str, message: str) -> None:
        """Show what the planner refused beside the field that it is about."""
        field = {"headroom": "headroom_percent"}.get(name, name)
        self.add_error(field if field in self.fields else None, message)
