"""What happened: the append-only event chain and the outbox."""

from __future__ import annotations

from django.apps import AppConfig


class EventsConfig(AppConfig):
    """The app's place in Django's registry."""

    name = "controlplane.events"
