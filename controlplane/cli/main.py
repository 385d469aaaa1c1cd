"""The ``tatkal`` command: tables of what the control API knows, and the wait for the first answer."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from controlplane.cli.client import ApiError, ControlClient, EndpointInfo, SlotInfo, complete
from controlplane.cli.moves import add_moves
from controlplane.cli.rollouts import add_rollouts
from controlplane.cli.run import CommandFailed, Run

READY_DEADLINE_S = 180.0
POLL_S = 0.5
DOT_EVERY_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status."""
    arguments = _parse(argv)
    try:
        run = Run.read(arguments.run)
        command: Callable[[Run, argparse.Namespace], None] = arguments.command
        command(run, arguments)
    except (CommandFailed, ApiError) as error:
        _print(f"tatkal: {error}", file=sys.stderr)
        return 1
    return 0


def wait_until_ready(
    run: Run,
    *,
    deadline_s: float,
    say: Callable[[str], None],
    complete: Callable[[], str],
    find: Callable[[], EndpointInfo],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Seconds until a real completion came back through the gateway.

    Says what it waits for whenever that changes, and a sign of life in between.

    Raises:
        CommandFailed: none came before ``deadline_s``; the message names the log to read.
    """
    started = clock()
    reason, said, said_at = "", "", started
    while True:
        try:
            if complete().strip():
                return clock() - started
            reason = "the answer was empty"
        except ApiError as error:
            reason = _waiting_for(error, find)
        if clock() - started > deadline_s:
            raise CommandFailed(
                f"No answer after {deadline_s:.0f} s: {reason}. Read {_log_of(reason, run)}."
            )
        if reason != said:
            say(f"      waiting: {reason}")
            said, said_at = reason, clock()
        elif clock() - said_at > DOT_EVERY_S:
            say(f"      still waiting ({clock() - started:.0f} s): {reason}")
            said_at = clock()
        sleep(POLL_S)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tatkal", description="The Tatkal command line.")
    home = Path(os.environ.get("TATKAL_HOME") or "var")
    parser.add_argument(
        "--run", type=Path, default=home / "run.json", help="run.json of the installation"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    ready = commands.add_parser("ready", help="wait for a real completion, and say how to call it")
    ready.add_argument("--deadline", type=float, default=READY_DEADLINE_S, metavar="SECONDS")
    ready.set_defaults(command=_ready)
    models = commands.add_parser("models", help="list models")
    models.set_defaults(command=_models)
    versions = commands.add_parser("versions", help="list versions")
    versions.add_argument("--model", default="", help="only versions of this model")
    versions.set_defaults(command=_versions)
    endpoints = commands.add_parser("endpoints", help="list endpoints with their readiness")
    endpoints.set_defaults(command=_endpoints)
    add_moves(commands)
    add_rollouts(commands)
    return parser.parse_args(argv)


def _ready(run: Run, arguments: argparse.Namespace) -> None:
    control = ControlClient(run.control_url, run.control_token)
    seconds = wait_until_ready(
        run,
        deadline_s=arguments.deadline,
        say=_print,
        complete=lambda: complete(run.gateway_url, run.api_key, run.endpoint),
        find=lambda: control.endpoint(run.endpoint),
    )
    control.close()
    _print(_greeting(run, seconds))


def _models(run: Run, _arguments: argparse.Namespace) -> None:
    models = ControlClient(run.control_url, run.control_token).models()
    _table(("MODEL", "DESCRIPTION"), ((model.name, model.description) for model in models))


def _versions(run: Run, arguments: argparse.Namespace) -> None:
    versions = ControlClient(run.control_url, run.control_token).versions(model=arguments.model)
    _table(
        ("VERSION", "STATE", "DTYPE", "QUANTIZATION", "CONTEXT", "PARAMETERS", "MIB"),
        (
            (
                version.name,
                version.state,
                version.dtype,
                version.quantization or "-",
                _cell(version.context_length),
                _cell(version.num_parameters),
                "-" if version.size_bytes is None else f"{version.size_bytes / 2**20:.1f}",
            )
            for version in versions
        ),
    )


def _endpoints(run: Run, _arguments: argparse.Namespace) -> None:
    endpoints = ControlClient(run.control_url, run.control_token).endpoints()
    _table(
        ("ENDPOINT", "ROLE", "VERSION", "GENERATION", "READY", "SLOTS"),
        (row for endpoint in endpoints for row in _endpoint_rows(endpoint)),
    )


def _endpoint_rows(endpoint: EndpointInfo) -> Iterable[tuple[str, ...]]:
    generation = f"{endpoint.generation}{'' if endpoint.is_published else ' (not published)'}"
    if endpoint.roles is None:
        yield endpoint.name, "-", "-", generation, "unknown", "Redis is away"
        return
    for role in endpoint.roles:
        slots = ", ".join(_slot_cell(slot) for slot in role.slots) or "none"
        yield endpoint.name, role.role, role.version, generation, _yes(role.is_ready), slots


def _slot_cell(slot: SlotInfo) -> str:
    return f"{slot.slot}: {slot.state}" + (f" ({slot.kernel})" if slot.kernel else "")


def _waiting_for(error: ApiError, find: Callable[[], EndpointInfo]) -> str:
    """Why there is no answer yet, from the refusal and from what the slots report."""
    if error.status == 0:
        return "the gateway does not answer yet"
    if error.status == 401:
        return "the gateway does not know the API key yet"
    try:
        roles = find().roles
    except ApiError:
        return error.message
    live = next((role for role in roles or () if role.role == "live"), None)
    if live is None or live.is_ready:
        return error.message
    if not live.slots:
        return f"no engine slot holds {live.version} yet"
    slot = live.slots[0]
    return f"{live.version} is {slot.state}{': ' + slot.detail if slot.detail else ''}"


def _log_of(reason: str, run: Run) -> str:
    name = "gateway.log" if "gateway" in reason else "engine-*.log"
    return f"{run.logs}/{name} and {run.logs}/supervisord.log"


def _greeting(run: Run, seconds: float) -> str:
    password = run.admin_password or "(as you set it)"
    question = {"role": "user", "content": "Why is the sky blue?"}
    body = json.dumps(
        {"model": run.endpoint, "messages": [question], "max_tokens": 64, "temperature": 0}
    )
    return f"""
Ready after {seconds:.0f} s.

  OpenAI API   {run.gateway_url}/v1    model {run.endpoint}
  API key      {run.api_key}
  Admin        {run.control_url}/admin/    {run.admin_user} / {password}
  REST API     {run.control_url}/api/v1    token {run.control_token}
  Logs         {run.logs}

  curl {run.gateway_url}/v1/chat/completions \\
    -H 'Authorization: Bearer {run.api_key}' \\
    -H 'Content-Type: application/json' \\
    -d '{body}'

Ctrl-C stops everything.
"""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        _print("  ".join(cells).rstrip())


def _cell(value: int | None) -> str:
    return "-" if value is None else str(value)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _print(text: str, *, file: Any = None) -> None:
    (file or sys.stdout).write(text + "\n")
    (file or sys.stdout).flush()


if __name__ == "__main__":
    sys.exit(main())
