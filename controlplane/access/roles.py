"""What people of the admin may do: the roles of control tokens, given by groups of the same names.

A superuser may everything, and is the only one who manages people and keys. Permissions that somebody was given one by
one go on counting; this adds to them.
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth.backends import BaseBackend

from controlplane.access.models import ROLES

APPS = frozenset({"access", "endpoints", "events", "monitoring", "registry", "rollouts"})
# Rows that an engineer adds or changes; every role sees all rows of ``APPS``.
CHANGED_BY_ENGINEERS = frozenset(
    f"{app}.{action}_{model}"
    for app, model in (
        ("registry", "model"), ("registry", "version"), ("endpoints", "endpoint"),
        ("monitoring", "flaggedterm"), ("rollouts", "policy"), ("rollouts", "rollout"),
    )
    for action in ("add", "change")
)  # fmt: skip


def role_of(user: Any) -> str:
    """The highest role that the groups of ``user`` give; empty when there is none."""
    if not user.is_active or user.is_anonymous:
        return ""
    if user.is_superuser:
        return ROLES[-1]
    # A page asks dozens of times; the object lives as long as the request.
    if not hasattr(user, "_role_by_group"):
        names = set(user.groups.values_list("name", flat=True))
        user._role_by_group = next((role for role in reversed(ROLES) if role in names), "")
    role: str = user._role_by_group
    return role


class RoleBackend(BaseBackend):
    """Permissions by role. It logs nobody in."""

    def has_perm(self, user_obj: Any, perm: str, obj: Any = None) -> bool:  # noqa: ARG002
        """Whether the role of the user allows ``app.action_model``."""
        role = role_of(user_obj)
        app, _, action = perm.partition(".")
        if not role or app not in APPS:
            return False
        is_engineer = ROLES.index(role) >= ROLES.index("engineer")
        return action.startswith("view_") or (is_engineer and perm in CHANGED_BY_ENGINEERS)

    def has_module_perms(self, user_obj: Any, app_label: str) -> bool:
        """Whether the menu shows the app at all."""
        return app_label in APPS and bool(role_of(user_obj))
