"""The form that registers a version: what ``services.check_draft`` refuses is said beside the field."""

from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings
from django.forms.renderers import BaseRenderer
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.widgets import UnfoldAdminTextInputWidget

from controlplane.registry import services, sources
from controlplane.registry.drafts import Draft, InvalidVersion, Source
from controlplane.registry.models import Model, Version

# The draft's name of a field, where the form calls it otherwise.
FORM_FIELDS = {"model": "model_name"}


class SuggestingInput(UnfoldAdminTextInputWidget):
    """A text field that offers values, and takes others."""

    def __init__(self) -> None:
        super().__init__()
        self.suggestions: list[str] = []

    def render(
        self,
        name: str,
        value: Any,
        attrs: dict[str, Any] | None = None,
        renderer: BaseRenderer | None = None,
    ) -> SafeString:
        """The field, and its list."""
        place = f"{name}_suggestions"
        text = super().render(name, value, {**(attrs or {}), "list": place}, renderer)
        options = format_html_join(
            "", '<option value="{}">', ((each,) for each in self.suggestions)
        )
        return format_html('{}<datalist id="{}">{}</datalist>', text, place, options)


class RegisterForm(forms.ModelForm):
    """What a person decides about a new version."""

    model_name = forms.CharField(
        label="Model",
        max_length=64,
        widget=SuggestingInput,
        help_text="An existing model, or a new one: lower-case letters, digits, '.', '_' and '-'.",
    )
    source = forms.CharField(max_length=1024, widget=SuggestingInput)

    class Meta:
        model = Version
        fields = (
            "source_kind", "source", "dtype", "keep_quantized", "chat_template", "engine_options", "runtime",
            "description", "notes", "parent", "run_link",
        )  # fmt: skip
        help_texts = {
            "dtype": "What the engine computes in, and the weights are stored in unless they are kept quantised.",
            "keep_quantized": "GGUF only: store Q4_0, Q4_1 and Q8_0 blocks as they are, nothing is rounded.",
            "chat_template": "Weights of another version only: a Jinja file that replaces its chat template.",
            "engine_options": 'JSON, such as {"max_num_seqs": 32, "max_model_len": 4096}.',
            "runtime": "JSON; empty: the interpreter and libraries of this machine. "
            '{"interpreter": "/path"} runs the version under that virtual environment.',
            "parent": "The version that this one was trained or made from.",
            "run_link": "The training run, such as its MLflow page.",
            "description": "One line for lists.",
            "notes": "Whatever the next person should know.",
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.draft: Draft | None = None
        roots = sources.allowed_roots(settings.MODEL_ROOTS)
        ready = Version.objects.ready().select_related("model").order_by("-pk")
        names = [version.name for version in ready[: sources.MAX_SUGGESTIONS]]
        self._suggest(
            "model_name", list(Model.objects.order_by("name").values_list("name", flat=True))
        )
        self._suggest("source", sources.suggest(roots) + names)
        self.fields["source"].help_text = (
            "A GGUF file or a Hugging Face directory below "
            f"{' or '.join(map(str, roots))}; or a version, as model/number, to share its weights."
        )
        # A help text of our own beside a link of the admin to add another version would lead astray.
        for link in ("can_add_related", "can_change_related", "can_view_related"):
            setattr(self.fields["parent"].widget, link, False)

    def clean(self) -> dict[str, Any]:
        """Everything that the service would refuse, named here."""
        data = super().clean() or {}
        if self.errors:
            return data
        draft = _draft(data)
        try:
            services.check_draft(draft)
        except InvalidVersion as error:
            self.add_error(FORM_FIELDS.get(error.field, error.field), error.message)
        else:
            self.draft = draft
        return data

    def _suggest(self, field: str, values: list[str]) -> None:
        widget = self.fields[field].widget
        if isinstance(widget, SuggestingInput):
            widget.suggestions = values


def initial_from(version: Version) -> dict[str, Any]:
    """What to begin with when ``version`` is registered again: its weights, or its source when it has none."""
    initial: dict[str, Any] = {
        "model_name": version.model.name,
        "dtype": version.dtype,
        "engine_options": version.engine_options,
        "description": version.description,
    }
    if version.is_ready:
        return initial | {
            "source_kind": Version.SourceKind.ARTIFACT,
            "source": version.name,
            "parent": version.pk,
        }
    return initial | {
        "source_kind": version.source_kind,
        "source": version.source,
        "keep_quantized": version.keep_quantized,
        "chat_template": version.chat_template,
        "parent": version.parent_id,
    }


def _draft(data: dict[str, Any]) -> Draft:
    return Draft(
        model=data["model_name"],
        source=Source(
            kind=data["source_kind"],
            location=data["source"],
            dtype=data["dtype"],
            keep_quantized=data["keep_quantized"],
            chat_template=data["chat_template"],
        ),
        engine_options=data["engine_options"] or {},
        runtime=data["runtime"] or {},
        description=data["description"],
        notes=data["notes"],
        parent=data["parent"].name if data["parent"] else "",
        run_link=data["run_link"],
    )
