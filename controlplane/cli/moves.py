"""Commands that change which version answers: promote, rollback, candidate."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from controlplane.cli.client import ControlClient, MoveInfo
from controlplane.cli.run import CommandFailed, Run

NOBODY = "none"


def add_moves(commands: Any) -> None:
    """Add the commands to the parser."""
    promote = commands.add_parser("promote", help="make a version live that a slot holds ready")
    promote.add_argument("endpoint")
    promote.add_argument("version", help="model/number")
    promote.add_argument("--reason", required=True, help="why; stands in the event log")
    promote.add_argument(
        "--expect", type=int, metavar="GENERATION", help="refuse if somebody changed the endpoint"
    )
    promote.set_defaults(command=_promote)

    rollback = commands.add_parser("rollback", help="take the live version back, at once")
    rollback.add_argument("endpoint")
    rollback.add_argument(
        "--from", dest="leave", metavar="VERSION", help="the version to leave; nothing, if not live"
    )
    rollback.add_argument("--to", metavar="VERSION", help="where to, if not to the previous one")
    rollback.add_argument("--reason", default="", help="why; may be added later in the admin")
    rollback.add_argument("--force", action="store_true", help="even if the target is not ready")
    rollback.set_defaults(command=_rollback)

    candidate = commands.add_parser("candidate", help="load a version beside the live one")
    candidate.add_argument("endpoint")
    candidate.add_argument("version", help=f"model/number, or {NOBODY!r} to let it go")
    candidate.add_argument(
        "--canary", type=float, metavar="PERCENT", help="share of the traffic; none, if left out"
    )
    candidate.add_argument("--reason", default="")
    candidate.set_defaults(command=_candidate)


def _promote(run: Run, arguments: argparse.Namespace) -> None:
    _tell(
        arguments.endpoint,
        _control(run).promote(
            arguments.endpoint,
            arguments.version,
            reason=arguments.reason,
            expected_generation=arguments.expect,
        ),
    )


def _rollback(run: Run, arguments: argparse.Namespace) -> None:
    _tell(
        arguments.endpoint,
        _control(run).rollback(
            arguments.endpoint,
            leave=arguments.leave,
            to=arguments.to,
            reason=arguments.reason,
            force=arguments.force,
        ),
    )


def _candidate(run: Run, arguments: argparse.Namespace) -> None:
    share = arguments.canary
    if share is not None and not 0 <= share <= 100:
        raise CommandFailed(f"--canary {share:g} must be from 0 to 100 per cent.")
    endpoint = _control(run).set_candidate(
        arguments.endpoint,
        None if arguments.version == NOBODY else arguments.version,
        canary_bp=None if share is None else round(share * 100),
        reason=arguments.reason,
    )
    _print(
        f"{endpoint.name}: generation {endpoint.generation}, candidate {arguments.version} with "
        f"{endpoint.canary_bp / 100:g} % of the traffic"
    )


def _control(run: Run) -> ControlClient:
    return ControlClient(run.control_url, run.control_token)


def _tell(endpoint: str, move: MoveInfo) -> None:
    _print(f"{endpoint}: {move.live} is live at generation {move.generation}{_how(move)}")


def _how(move: MoveInfo) -> str:
    if not move.changed:
        return "; it was so already"
    if not move.published:
        return "; Redis is away, and hears of it as soon as it is back"
    return (
        f", applied in {move.applied_in_ms or 0:.0f} ms; {move.requeued} waiting requests moved, "
        f"{move.in_flight} still run on a version without a route"
    )


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
