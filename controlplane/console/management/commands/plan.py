"""`manage.py plan`: what fits on a device, how fast, and what it costs; and what this machine can do."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.core.management import BaseCommand, CommandError

from controlplane.console import measuring, plan_text
from controlplane.endpoints.services import find_version
from controlplane.errors import DomainError
from controlplane.registry import plans
from inference.calibration import write_calibration, write_steps
from inference.planner.hardware import DEVICES, THIS_MACHINE

# Flag: the name that the planner knows it by, its type, and what it says.
FLAGS: dict[str, tuple[str, Any, str]] = {
    "--hardware": ("hardware", str, f"one of {', '.join(DEVICES)}, {THIS_MACHINE}"),
    "--version": ("version", str, "MODEL/N of the registry, in place of sizes"),
    "--params": ("params", float, "number of weights, for instance 7e9"),
    "--layers": ("num_layers", int, "number of layers"),
    "--hidden": ("hidden_size", int, "width of the residual stream"),
    "--heads": ("num_heads", int, "query heads; default: hidden/128"),
    "--kv-heads": ("num_kv_heads", int, "heads of keys and values; default: as many as query heads"),
    "--head-dim": ("head_dim", int, "width of a head"),
    "--context": ("context", int, "tokens of a sequence, prompt and answer; default 2048"),
    "--weights": ("weights", str, "fp32, bf16, fp16, fp8, int8 or int4; default fp16"),
    "--group-size": ("group_size", int, "columns that share a scale; default 0: scales not counted"),
    "--kv": ("kv", str, "format of keys and values; default fp16"),
    "--block-size": ("block_size", int, "tokens of a KV block; default 16"),
    "--headroom": ("headroom", float, "share of memory left to others, 0 to 0.2; default 0"),
    "--batch": ("batch", int, "sequences of a step; default: as many as fit"),
    "--prompt-tokens": ("prompt_tokens", int, "of a request; default 512"),
    "--output-tokens": ("output_tokens", int, "of a request; default 128"),
    "--price-per-hour": ("price_per_hour", float, "of the device, in any currency"),
    "--rate": ("rate", float, "requests a second, to count replicas"),
    "--ttft": ("ttft_s", float, "seconds within which 99 %% get their first token"),
    "--tpot": ("tpot_s", float, "seconds from token to token, on average"),
    "--output-cv2": ("output_cv2", float, "squared variation of answers' lengths; default 1"),
}  # fmt: skip


class Command(BaseCommand):
    """Ask the planner, or measure for it."""

    help = __doc__ or ""
    requires_migrations_checks = False

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        """Without Django's ``--version``, whose name is better used for a version."""
        return super().create_parser(prog_name, subcommand, conflict_handler="resolve", **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Sizes or a version, the device, what is to be told."""
        for flag, (name, kind, text) in FLAGS.items():
            parser.add_argument(flag, dest=name, type=kind, help=text)
        parser.add_argument(
            "--lengths", type=_lengths, help="lengths of answers by commas, to be batched"
        )
        parser.add_argument(
            "--standby",
            action="store_true",
            dest="with_standby",
            help="price of a standby and of a candidate",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument(
            "--calibrate", action="store_true", help="measure this machine first, and keep it"
        )
        parser.add_argument(
            "--measure",
            nargs="+",
            metavar="MODEL/N",
            help="measure decode steps of versions beside their floor, and keep them",
        )

    def handle(self, *_: Any, **options: Any) -> None:
        """Measure, plan, print."""
        try:
            if options["calibrate"]:
                self._calibrate(is_json=options["json"])
            if options["measure"]:
                self._measure(options["measure"], is_json=options["json"])
            if options["hardware"] or not (options["calibrate"] or options["measure"]):
                self._plan(options)
        except plans.PlanRefused as error:
            raise CommandError(f"{_flag_of(error.name)}: {error.message}") from error
        except DomainError as error:
            raise CommandError(error.message) from error

    def _plan(self, options: dict[str, Any]) -> None:
        names = [name for name, _, _ in FLAGS.values()]
        answer = plans.plan({name: options[name] for name in (*names, "lengths", "with_standby")})
        if options["json"]:
            self._print([json.dumps(answer.to_dict(), indent=2)])
        else:
            self._print(plan_text.describe(answer))

    def _calibrate(self, *, is_json: bool) -> None:
        calibration = measuring.measure_rates()
        path = write_calibration(settings.TATKAL_HOME, calibration)
        if is_json:
            self._print([json.dumps(calibration.to_dict(), indent=2)])
        else:
            self._print([*plan_text.describe_calibration(calibration), f"  kept in {path}"])

    def _measure(self, names: list[str], *, is_json: bool) -> None:
        calibration = plans.calibration()
        if calibration is None:
            raise CommandError("This machine has not been measured: add --calibrate.")
        curves = [measuring.measure_steps(find_version(name)) for name in names]
        write_steps(settings.TATKAL_HOME, curves)
        if is_json:
            self._print([json.dumps([curve.to_dict() for curve in curves], indent=2)])
            return
        for curve in curves:
            self._print(plan_text.describe_steps(curve, calibration.device()))

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.stdout.write(line)


def _lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _flag_of(name: str) -> str:
    flags = {planner_name: flag for flag, (planner_name, _, _) in FLAGS.items()}
    return flags.get(name, f"--{name.replace('_', '-')}")
