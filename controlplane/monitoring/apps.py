"""What the traffic looks like."""

from __future__ import annotations

from django.apps import AppConfig


class MonitoringConfig(AppConfig):
    """The app's place in Django's registry."""

    name = "controlplane.monitoring"
