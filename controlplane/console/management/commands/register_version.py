"""`manage.py register_version`: add a version from a terminal or a training job, and wait for it."""

from __future__ import annotations

import getpass
import json
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.utils import timezone

from controlplane.registry import services
from controlplane.registry.drafts import Draft, InvalidVersion, Source
from controlplane.registry.models import Version

POLL_S = 0.5


class Command(BaseCommand):
    """Register a version as forms and REST do; the tasks worker imports it."""

    help = "Register the next version of MODEL from SOURCE, a path below the allowed model roots."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Names and meanings are those of the form."""
        parser.add_argument("model", metavar="MODEL", help="existing, or new")
        parser.add_argument(
            "source",
            metavar="SOURCE",
            help="a GGUF file, a Hugging Face directory, or MODEL/NUMBER to share the weights of that version",
        )
        parser.add_argument(
            "--kind", choices=Version.SourceKind.values, help="default: what SOURCE looks like"
        )
        parser.add_argument("--dtype", choices=Version.Dtype.values, default="bfloat16")
        parser.add_argument("--keep-quantized", action="store_true")
        parser.add_argument("--chat-template", default="", metavar="FILE")
        parser.add_argument("--engine-options", default="{}", metavar="JSON")
        parser.add_argument("--runtime", default="{}", metavar="JSON")
        parser.add_argument("--parent", default="", metavar="MODEL/NUMBER")
        parser.add_argument("--run-link", default="", metavar="URL")
        parser.add_argument("--description", default="")
        parser.add_argument("--notes", default="")
        parser.add_argument("--wait", action="store_true", help="until it is ready or failed")
        parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS")

    def handle(self, *_: Any, wait: bool, timeout: float, **options: Any) -> None:
        """Print the version's name; with ``--wait`` its progress, and fail when it fails."""
        try:
            version = services.register(
                draft=_draft(options), actor=getpass.getuser(), now=timezone.now()
            )
        except InvalidVersion as error:
            raise CommandError(f"{error.field}: {error.message}") from error
        self.stdout.write(f"{version.name} registered, {version.state}")
        if wait:
            self._wait(version, deadline=time.monotonic() + timeout)

    def _wait(self, version: Version, *, deadline: float) -> None:
        said = ""
        while not version.is_settled:
            if time.monotonic() > deadline:
                raise CommandError(
                    f"{version.name} is still {version.state}; it goes on without this command. "
                    "Is the tasks worker running?"
                )
            time.sleep(POLL_S)
            version.refresh_from_db()
            if (line := _progress(version)) != said:
                self.stdout.write(f"{version.name} {line}")
                said = line
        if not version.is_ready:
            raise CommandError(f"{version.name} failed. {version.state_reason}")


def _draft(options: dict[str, Any]) -> Draft:
    kind = options["kind"] or _guess_kind(options["source"])
    is_path = kind != Version.SourceKind.ARTIFACT
    template = options["chat_template"]
    return Draft(
        model=options["model"],
        source=Source(
            kind=kind,
            location=str(Path(options["source"]).absolute()) if is_path else options["source"],
            dtype=options["dtype"],
            keep_quantized=options["keep_quantized"],
            chat_template=str(Path(template).absolute()) if template else "",
        ),
        engine_options=_json_object("--engine-options", options["engine_options"]),
        runtime=_json_object("--runtime", options["runtime"]),
        description=options["description"],
        notes=options["notes"],
        parent=options["parent"],
        run_link=options["run_link"],
    )


def _guess_kind(source: str) -> str:
    path = Path(source)
    if path.is_dir():
        return Version.SourceKind.HUGGINGFACE
    is_version = not path.exists() and Version.objects.named(source).exists()
    return Version.SourceKind.ARTIFACT if is_version else Version.SourceKind.GGUF


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{option}: {text!r} is no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CommandError(f"{option}: {text!r} must be a JSON object.")
    return value


def _progress(version: Version) -> str:
    shown = version.import_progress
    if version.state != Version.State.IMPORTING or not shown:
        return version.state
    share = f" {100 * shown['done'] // shown['total']} %" if shown["total"] else ""
    return f"{version.state}{share}: {shown['what']}"
