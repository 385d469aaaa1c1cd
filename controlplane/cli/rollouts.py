"""Commands about rollouts: start one, see where it stands, watch it, and move it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from controlplane.cli.client import ApiError, ControlClient, RolloutInfo
from controlplane.cli.run import CommandFailed, Run

WATCH_DEADLINE_S = 24 * 3600.0
POLL_S = 2.0
# A control process that restarts is waited for.
PATIENCE_S = 60.0
GOOD_ENDS = ("promoted", "completed")

# What may be done without saying more than why.
ACTIONS = {
    "pause": "hold it where it is; gates and deadlines go on",
    "resume": "let it go on; past a failed gate it needs a reason",
    "approve": "let it go on; an approver who did not start it",
    "promote": "make the candidate live before its steps are done",
    "abort": "end it; the candidate is not rejected",
    "rollback": "take the candidate back at once, in any state, and reject it",
    "retry": "start what has ended again, under the newest version of its policy",
}


def add_rollouts(commands: Any) -> None:
    """Add the commands to the parser."""
    rollout = commands.add_parser("rollout", help="start, watch and move rollouts")
    verbs = rollout.add_subparsers(required=True, metavar="VERB")

    start = verbs.add_parser("start", help="let a version earn its traffic, step by step")
    start.add_argument("endpoint")
    start.add_argument("version", help="model/number")
    start.add_argument("--policy", default="careful", help="name or name/version (careful)")
    start.add_argument("--reason", default="", help="why; stands in the event log")
    start.add_argument(
        "--rejected", action="store_true", help="a version that was rolled back here before"
    )
    start.set_defaults(command=_start)

    status = verbs.add_parser("status", help="where it stands, and why")
    _add_name(status)
    status.set_defaults(command=_status)

    watch = verbs.add_parser("watch", help="say what changes until it ends; 1 unless it went well")
    _add_name(watch)
    watch.add_argument("--deadline", type=float, default=WATCH_DEADLINE_S, metavar="SECONDS")
    watch.set_defaults(command=_watch)

    for action, told in ACTIONS.items():
        verb = verbs.add_parser(action, help=told)
        _add_name(verb)
        verb.add_argument("--reason", default="", help="why; stands in the event log")
        if action == "rollback":
            verb.add_argument(
                "--force", action="store_true", help="even if the incumbent is not ready"
            )
        verb.set_defaults(command=_act, action=action)


def watch(
    find: Callable[[], RolloutInfo],
    *,
    deadline_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RolloutInfo:
    """The rollout when it has ended; says where it stands whenever that changes.

    Raises:
        CommandFailed: it has not ended before ``deadline_s``.
        ApiError: the server has not answered for ``PATIENCE_S``, or refuses.
    """
    started = answered = clock()
    said = ""
    while True:
        try:
            rollout = find()
            answered = clock()
            if (told := _line(rollout)) != said:
                say(told)
                said = told
            if not rollout.is_active:
                return rollout
        except ApiError as error:
            if 0 < error.status < 500 or clock() - answered > PATIENCE_S:
                raise
        if clock() - started > deadline_s:
            raise CommandFailed(f"It has not ended after {deadline_s:.0f} s: {said}")
        sleep(POLL_S)


def _start(run: Run, arguments: argparse.Namespace) -> None:
    rollout = _control(run).start_rollout(
        arguments.endpoint,
        arguments.version,
        policy=arguments.policy,
        reason=arguments.reason,
        takes_rejected=arguments.rejected,
    )
    _print(_line(rollout))
    _print(f"Watch it with: tatkal rollout watch {rollout.id}")


def _status(run: Run, arguments: argparse.Namespace) -> None:
    control = _control(run)
    rollout = control.rollout(arguments.rollout)
    _print(_line(rollout))
    for step in rollout.steps:
        number = f"{step.index + 1}." if step.index >= 0 else "  "
        done = f"  {step.share:.0%}" if step.phase == "current" else ""
        _print(f"  {number} {step.title:32} {step.phase}{done}")
    for gate in control.gates(rollout.id):
        _print(f"  {gate.verdict:12} {gate.sentence}")


def _watch(run: Run, arguments: argparse.Namespace) -> None:
    control = _control(run)
    key = control.rollout(arguments.rollout).id
    rollout = watch(lambda: control.rollout(key), deadline_s=arguments.deadline, say=_print)
    if rollout.state not in GOOD_ENDS:
        raise CommandFailed(f"{rollout.candidate} was not promoted: {rollout.state}.")


def _act(run: Run, arguments: argparse.Namespace) -> None:
    control = _control(run)
    body: dict[str, Any] = {"reason": arguments.reason}
    if getattr(arguments, "force", False):
        body["force"] = True
    key = control.rollout(arguments.rollout).id
    _print(_line(control.move_rollout(key, arguments.action, body)))


def _line(rollout: RolloutInfo) -> str:
    num_steps = sum(step.index >= 0 for step in rollout.steps)
    step = f", step {rollout.step_index + 1} of {num_steps}" if rollout.is_active else ""
    share = f", {rollout.canary_bp / 100:g} % of the traffic" if rollout.canary_bp else ""
    return (
        f"{rollout.id} {rollout.candidate} on {rollout.endpoint}: {rollout.state}{step}{share}, gates "
        f"{rollout.verdict}. {rollout.why}"
    )


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollout", help="its id, or an endpoint for the newest one there")


def _control(run: Run) -> ControlClient:
    return ControlClient(run.control_url, run.control_token)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
