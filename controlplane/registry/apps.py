"""Which models exist, and in which versions."""

from __future__ import annotations

from django.apps import AppConfig


class RegistryConfig(AppConfig):
    """The app's place in Django's registry."""

    name = "controlplane.registry"
