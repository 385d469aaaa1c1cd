"""API keys in the admin: issue one and see its clear text once, revoke, rotate. And the people who log in."""

# Django fixes the signatures of these methods, used or not.
# ruff: noqa: ARG002
from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.auth.admin import GroupAdmin, UserAdmin
from django.contrib.auth.models import Group, User
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from unfold.admin import ModelAdmin
from unfold.contrib.filters.admin import ChoicesDropdownFilter, RangeDateTimeFilter
from unfold.decorators import display
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm
from unfold.widgets import UnfoldAdminTextInputWidget

from controlplane.access import services
from controlplane.access.models import ApiKey
from controlplane.errors import DomainError

ISSUED = "admin/access/apikey/issued.html"


class IssueForm(forms.ModelForm):
    """What a person decides about a new key."""

    endpoints = forms.CharField(
        required=False,
        max_length=4000,
        widget=UnfoldAdminTextInputWidget,
        help_text="Names with blanks between them, to limit an application's key to these endpoints.",
    )

    class Meta:
        model = ApiKey
        fields = ("name", "kind", "role", "endpoints", "expires_at")

    def clean_endpoints(self) -> list[str]:
        """Its names."""
        text: str = self.cleaned_data["endpoints"]
        return text.replace(",", " ").split()

    def clean(self) -> dict[str, Any]:
        """A role for control tokens, none for applications."""
        data = super().clean() or {}
        is_control = data.get("kind") == ApiKey.Kind.CONTROL
        if is_control and not data.get("role"):
            self.add_error("role", "Choose a role for a control token.")
        if not is_control and data.get("role"):
            self.add_error("role", "Only control tokens have a role.")
        try:
            services.check_endpoints(data.get("kind", ""), data.get("endpoints", []))
        except DomainError as error:
            self.add_error("endpoints", error.message)
        if data.get("expires_at") and data["expires_at"] <= timezone.now():
            self.add_error("expires_at", "Choose a moment to come.")
        return data


@admin.register(ApiKey)
class ApiKeyPage(ModelAdmin):
    """Keys by id and last four characters."""

    list_display = (
        "name",
        "key_id",
        "last4",
        "kind",
        "show_role",
        "show_endpoints",
        "show_state",
        "created_at",
        "expires_at",
    )
    list_filter = (
        ("kind", ChoicesDropdownFilter),
        ("role", ChoicesDropdownFilter),
        ("created_at", RangeDateTimeFilter),
    )
    list_filter_submit = True
    empty_hint = "Applications need a key to ask, engineers a control token for REST."
    search_fields = ("name", "key_id", "last4")
    ordering = ("-id",)
    actions = ("revoke", "rotate")
    exclude = ("digest",)

    def get_form(
        self, request: HttpRequest, obj: ApiKey | None = None, change: bool = False, **kwargs: Any
    ) -> type[ModelForm]:
        """The form of a new key; an existing one is shown as text."""
        if obj is None:
            kwargs["form"] = IssueForm
            kwargs["fields"] = IssueForm.Meta.fields
        form: type[ModelForm] = super().get_form(request, obj, change=change, **kwargs)
        return form

    def get_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        """What there is to fill in, or to see."""
        if obj is None:
            return IssueForm.Meta.fields
        hidden = ("id", "digest", "endpoints")
        shown = [field.name for field in ApiKey._meta.fields if field.name not in hidden]
        return [*shown, "show_endpoints"]

    def get_readonly_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        """Whatever is shown and not stored so."""
        return ("show_endpoints",) if obj else ()

    def has_change_permission(self, request: HttpRequest, obj: ApiKey | None = None) -> bool:
        """Keys are revoked or rotated, never edited."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: ApiKey | None = None) -> bool:
        """A revoked key stays, as a refusal and for the log."""
        return False

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Issue the key."""
        issued = services.issue(
            name=obj.name,
            kind=obj.kind,
            role=obj.role,
            endpoints=form.cleaned_data["endpoints"],
            expires_at=obj.expires_at,
            actor=request.user.get_username(),
            now=timezone.now(),
        )
        obj.pk = issued.key.pk
        obj.refresh_from_db()
        obj.issued = issued

    def response_add(self, request: HttpRequest, obj: Any, *args: Any) -> HttpResponse:
        """The page with the clear text."""
        return self._show_once(request, [obj.issued])

    @admin.action(description="Revoke the selected keys", permissions=["add"])
    def revoke(self, request: HttpRequest, keys: QuerySet[ApiKey]) -> None:
        """End the keys."""
        for key in keys:
            services.revoke(
                key_id=key.key_id, actor=request.user.get_username(), now=timezone.now()
            )
        self.message_user(request, "Revoked; gateways refuse them within seconds.")

    @admin.action(description="Rotate the selected keys", permissions=["add"])
    def rotate(self, request: HttpRequest, keys: QuerySet[ApiKey]) -> HttpResponse | None:
        """A successor for each, shown once; the old ones end in a day."""
        successors = []
        for key in keys:
            try:
                issued = services.rotate(
                    key_id=key.key_id, actor=request.user.get_username(), now=timezone.now()
                )
            except DomainError as error:
                self.message_user(request, error.message, messages.ERROR)
            else:
                successors.append(issued)
        return self._show_once(request, successors) if successors else None

    @admin.display(description="role", ordering="role")
    def show_role(self, key: ApiKey) -> str:
        """Of a control token."""
        return key.role or "-"

    @display(
        description="state",
        label={"active": "success", "expired": "warning", "revoked": "danger"},
    )
    def show_state(self, key: ApiKey) -> str:
        """The state as a coloured label."""
        return key.state_at(timezone.now())

    @admin.display(description="endpoints")
    def show_endpoints(self, key: ApiKey) -> str:
        """What an application's key opens."""
        if key.kind == ApiKey.Kind.CONTROL:
            return "-"
        return ", ".join(key.endpoints) or "all"

    def _show_once(self, request: HttpRequest, issued: list[services.Issued]) -> HttpResponse:
        """Clear texts, in this answer alone: a message for the next page would be stored until then."""
        context = {
            **self.admin_site.each_context(request),
            "title": "Copy them now" if len(issued) > 1 else "Copy it now",
            "opts": self.opts,
            "issued": issued,
        }
        return TemplateResponse(request, ISSUED, context)


admin.site.unregister(User)
admin.site.unregister(Group)


@admin.register(User)
class UserPage(UserAdmin, ModelAdmin):
    """People who log in here."""

    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    # What people may do comes with their groups, one for each role.
    fieldsets = (
        (None, {"fields": ("username", "password")}),
        ("Person", {"fields": ("first_name", "last_name", "email")}),
        ("May do", {"fields": ("is_active", "is_staff", "is_superuser", "groups")}),
        ("Dates", {"fields": ("last_login", "date_joined")}),
    )
    readonly_fields = ("last_login", "date_joined")
    filter_horizontal = ()
    list_display = ("username", "email", "is_active", "is_staff", "is_superuser", "last_login")


@admin.register(Group)
class GroupPage(GroupAdmin, ModelAdmin):
    """What groups of people may do."""
