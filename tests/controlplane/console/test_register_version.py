"""`manage.py register_version`: the version is registered, and followed to its end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from controlplane.console.management.commands import register_version
from controlplane.registry.models import Version
from tests.factories import make_version

COMMAND = "register_version"


@pytest.fixture
def root(tmp_path: Path, settings: Any) -> Path:
    """The one allowed root, with a file and a directory."""
    settings.MODEL_ROOTS = (tmp_path,)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    (tmp_path / "tiny-hf").mkdir()
    return tmp_path


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command(COMMAND, *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.django_db
def test_everything_that_can_be_said_is_registered(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = make_version(model="base")
    monkeypatch.chdir(root)
    told = run(
        "tiny", "tiny.gguf", "--keep-quantized", "--parent", parent.name, "--run-link",
        "https://mlflow.test/7", "--notes", "Trained twice.", "--description", "Trains.",
        "--engine-options", '{"max_num_seqs": 8}',
    )  # fmt: skip
    assert told == "tiny/1 registered, pending\n"
    version = Version.objects.named("tiny/1").get()
    assert version.source == str(root / "tiny.gguf"), "a relative path is that of the caller"
    assert (version.keep_quantized, version.parent, version.notes) == (
        True,
        parent,
        "Trained twice.",
    )
    assert version.engine_options == {"max_num_seqs": 8}


@pytest.mark.django_db
def test_the_kind_follows_from_what_the_source_is(root: Path) -> None:
    base = make_version(model="base")
    run("tiny", str(root / "tiny.gguf"))
    run("tiny", str(root / "tiny-hf"), "--dtype", "float32")
    run("tiny", base.name)
    kinds = Version.objects.filter(model__name="tiny").order_by("number")
    assert [version.source_kind for version in kinds] == ["gguf", "huggingface", "artifact"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tiny", "/etc/passwd"), "source: .*outside the allowed model roots"),
        (("Tiny", "{root}/tiny.gguf"), "model: "),
        (("tiny", "{root}/tiny.gguf", "--engine-options", "{{"), "--engine-options: .*no JSON"),
        (("tiny", "{root}/tiny.gguf", "--runtime", "[]"), "--runtime: .*JSON object"),
        (("tiny", "{root}/tiny.gguf", "--parent", "tiny/7"), "parent: .*tiny/7"),
    ],
)
def test_a_refusal_names_the_field(root: Path, arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(CommandError, match=told):
        run(*(each.format(root=root) for each in arguments))
    assert not Version.objects.exists()


@pytest.fixture
def importer(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """The import as the command sees it: each look at the row finds the next state."""
    monkeypatch.setattr(register_version, "POLL_S", 0.0)

    def play(*states: dict[str, Any]) -> None:
        left = list(states)
        refresh = Version.refresh_from_db

        def next_state(version: Version, *args: Any, **kwargs: Any) -> None:
            if left:
                Version.objects.filter(pk=version.pk).update(**left.pop(0))
            refresh(version, *args, **kwargs)

        monkeypatch.setattr(Version, "refresh_from_db", next_state)

    return play


@pytest.mark.django_db
def test_waiting_prints_progress_until_the_version_is_ready(
    root: Path, importer: Callable[..., None]
) -> None:
    importer(
        {"state": "importing"},
        {"import_progress": {"done": 3, "total": 30, "what": "layer 3"}},
        {"import_progress": {"done": 3, "total": 30, "what": "layer 3"}},
        {"state": "ready", "artifact": "/a", "import_progress": {}},
    )
    told = run("tiny", str(root / "tiny.gguf"), "--wait")
    assert told.splitlines() == [
        "tiny/1 registered, pending",
        "tiny/1 importing",
        "tiny/1 importing 10 %: layer 3",
        "tiny/1 ready",
    ]


@pytest.mark.django_db
def test_waiting_fails_with_the_reason_when_the_version_fails(
    root: Path, importer: Callable[..., None]
) -> None:
    importer({"state": "failed", "state_reason": "broken_artifact: tiny.gguf: cut off."})
    with pytest.raises(CommandError, match=r"tiny/1 failed\. broken_artifact: tiny\.gguf"):
        run("tiny", str(root / "tiny.gguf"), "--wait")


@pytest.mark.django_db
def test_waiting_ends_when_its_time_is_over(root: Path, importer: Callable[..., None]) -> None:
    importer()
    with pytest.raises(CommandError, match="still pending"):
        run("tiny", str(root / "tiny.gguf"), "--wait", "--timeout", "0.05")
    assert Version.objects.count() == 1
