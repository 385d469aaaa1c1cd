"""Whether the record of what happened is whole: ``manage.py verify_events``."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.events.services import verify


class Command(BaseCommand):
    """Walks the chain of events; the exit code is 1, and the first broken link is named, when it does not hold."""

    help = "Check that no event was changed, inserted or removed since it was written."

    def handle(self, *_: Any, **__: Any) -> None:
        """Walk the chain."""
        found = verify()
        if not found.is_intact:
            raise CommandError(f"{found.problem} {found.num_events} events before it are intact.")
        self.stdout.write(f"{found.num_events} events, all as they were written.")
