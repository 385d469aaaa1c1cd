"""Commands an operator runs on the machine itself."""

from __future__ import annotations

from django.apps import AppConfig


class ConsoleConfig(AppConfig):
    """The app's place in Django's registry; it has commands and no rows."""

    name = "controlplane.console"
