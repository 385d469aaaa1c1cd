"""The app's place in Django's registry."""

from __future__ import annotations

from django.apps import AppConfig


class DashboardConfig(AppConfig):
    """Pages inside the admin; it has no rows."""

    name = "controlplane.dashboard"
