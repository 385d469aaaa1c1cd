"""`manage.py backtest`: what the gates would have said of recorded traffic."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management import BaseCommand, CommandError

from controlplane.errors import DomainError
from controlplane.rollouts import backtest
from controlplane.rollouts.policy import default_policy, read_policy


class Command(BaseCommand):
    """Replay a file and print the verdict."""

    help = "Judge recorded traffic (JSON lines) with the code that judges live traffic."
    # It reads a file and no database.
    requires_system_checks = []
    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        """FILE, and how to judge and print it."""
        parser.add_argument("file", type=Path, help="recorded traffic, one JSON object per line")
        parser.add_argument(
            "--policy", type=Path, help="a policy in JSON; default: any flag is a loss"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument(
            "--strict", action="store_true", help="stop at a malformed line instead of skipping it"
        )

    def handle(
        self, *_: Any, file: Path, policy: Path | None, json: bool, strict: bool, **__: Any
    ) -> None:
        """Read, judge, print."""
        try:
            chosen = read_policy(policy.read_text("utf-8")) if policy else default_policy()
            with file.open(encoding="utf-8-sig", errors="replace") as lines:
                report = backtest.run(lines, chosen, is_strict=strict)
        except (OSError, DomainError) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(backtest.dump(report.to_json()) if json else report.to_text())
