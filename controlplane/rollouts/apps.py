"""How candidates earn their traffic."""

from __future__ import annotations

from django.apps import AppConfig


class RolloutsConfig(AppConfig):
    """The app's place in Django's registry."""

    name = "controlplane.rollouts"
    default_auto_field = "django.db.models.BigAutoField"
