"""Who may: API keys and their roles."""

from __future__ import annotations

from django.apps import AppConfig


class AccessConfig(AppConfig):
    """The app's place in Django's registry."""

    name = "controlplane.access"
