"""Which version answers under which name."""

from __future__ import annotations

from django.apps import AppConfig


class EndpointsConfig(AppConfig):
    """The app's place in Django's registry."""

    name = "controlplane.endpoints"
