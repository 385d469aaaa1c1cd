"""Registering versions, and the way of a version from its source to READY or FAILED."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, transaction

from controlplane.events.models import Event
from controlplane.registry import imports, services
from controlplane.registry.models import Model, Version, VersionImmutable
from tests.factories import NOW, make_version

pytestmark = pytest.mark.django_db

SOURCE = services.Source("gguf", Path("/models/tiny.gguf"))
MANIFEST: dict[str, Any] = {
    "quantization": "none",
    "weights_digest": "a" * 64,
    "tokenizer_digest": "b" * 64,
    "chat_template_digest": "",
    "model": {"context_length": 2048},
    "num_parameters": 1_000_000,
    "size_bytes": 2_000_000,
    "generation_defaults": {"temperature": 0.7},
}


def register(**fields: Any) -> Version:
    values: dict[str, Any] = {"model": "tiny", "source": SOURCE, "actor": "ada", "now": NOW}
    return services.register(**values | fields)


def clock() -> datetime:
    return NOW + timedelta(seconds=5)


@pytest.fixture
def importing(tmp_path: Path) -> services.Importing:
    return services.Importing(root=tmp_path)


@pytest.fixture
def importer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[list[str]]]:
    """Replaces the child process by its result: a manifest, or a failure."""

    def replace(result: Any) -> list[list[str]]:
        calls: list[list[str]] = []

        def run(arguments: list[str], **_: Any) -> imports.ImportReport:
            calls.append(arguments)
            if isinstance(result, imports.ImportFailed):
                raise result
            return imports.ImportReport(Path("/artifacts/abc"), result)

        monkeypatch.setattr(imports, "run_import", run)
        return calls

    return replace


def test_versions_of_a_model_are_numbered_without_gaps() -> None:
    assert [register().number for _ in range(3)] == [1, 2, 3]
    assert register(model="other").number == 1
    assert Model.objects.count() == 2


def test_registering_is_recorded() -> None:
    version = register()
    assert version.state == Version.State.PENDING
    event = Event.objects.about("version:tiny/1").get()
    assert (event.type, event.actor) == ("version.registered", "ada")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "Tiny"}, "Model name 'Tiny'"),
        ({"model": "a/b"}, "Model name 'a/b'"),
        ({"source": services.Source("onnx", Path("/x"))}, "Source kind 'onnx'"),
        ({"source": services.Source("gguf", Path("x.gguf"))}, "must be absolute"),
        ({"source": services.Source("gguf", Path("/x"), dtype="int3")}, "dtype='int3'"),
        ({"engine_options": {"block_sise": 16}}, "block_sise"),
        ({"engine_options": {"block_size": 0}}, "block_size=0"),
        ({"engine_options": {"block_size": "many"}}, "cannot work"),
    ],
)
def test_what_cannot_work_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(services.InvalidVersion, match=named):
        register(**fields)
    assert not Version.objects.exists()


def test_an_imported_version_is_ready_with_everything_the_manifest_says(
    importing: services.Importing, importer: Callable[[Any], list[list[str]]]
) -> None:
    calls = importer(MANIFEST)
    register()
    version = services.import_pending(importing=importing, clock=clock)
    assert version is not None
    assert version.is_ready
    assert version.artifact == "/artifacts/abc"
    assert version.weights_digest == "a" * 64
    assert version.context_length == 2048
    assert version.generation_defaults == {"temperature": 0.7}
    assert version.runtime["python"].startswith("3.")
    assert calls == [
        ["gguf", "/models/tiny.gguf", "--root", str(importing.root), "--dtype", "bfloat16"]
    ]
    assert Event.objects.about("version:tiny/1").filter(type="version.ready").exists()


def test_a_quantised_source_is_kept_as_it_is_when_asked(
    importing: services.Importing, importer: Callable[[Any], list[list[str]]]
) -> None:
    calls = importer(MANIFEST | {"quantization": "int4"})
    register(source=services.Source("gguf", Path("/q.gguf"), keep_quantized=True))
    version = services.import_pending(importing=importing, clock=clock)
    assert version is not None
    assert version.quantization == "int4"
    assert calls[0][-1] == "--keep-quantized"


def test_a_refused_source_fails_the_version_with_the_reason(
    importing: services.Importing, importer: Callable[[Any], list[list[str]]]
) -> None:
    importer(imports.ImportFailed("unsupported_model", "family 'x' is not supported."))
    register()
    version = services.import_pending(importing=importing, clock=clock)
    assert version is not None
    assert version.state == Version.State.FAILED
    assert version.state_reason == "unsupported_model: family 'x' is not supported."
    assert services.import_pending(importing=importing, clock=clock) is None


def test_an_import_that_was_told_to_stop_begins_again(
    importing: services.Importing, importer: Callable[[Any], list[list[str]]]
) -> None:
    importer(imports.ImportFailed("interrupted", "told to stop", may_retry=True))
    register()
    services.import_pending(importing=importing, clock=clock)
    assert Version.objects.get().state == Version.State.PENDING
    importer(MANIFEST)
    services.import_pending(importing=importing, clock=clock)
    assert Version.objects.get().is_ready


def test_of_two_importers_one_takes_the_version(
    importing: services.Importing, importer: Callable[[Any], list[list[str]]]
) -> None:
    importer(MANIFEST)
    version = register()
    Version.objects.update(state=Version.State.IMPORTING, import_started_at=NOW)
    assert services.import_version(version=version, importing=importing, clock=clock) is None
    assert services.import_pending(importing=importing, clock=clock) is None


def test_an_import_whose_process_died_is_taken_again_when_none_can_be_running(
    importing: services.Importing, importer: Callable[[Any], list[list[str]]]
) -> None:
    importer(MANIFEST)
    register()
    Version.objects.update(state=Version.State.IMPORTING, import_started_at=NOW)
    late = NOW + timedelta(seconds=importing.limits.timeout_s + 61)
    version = services.import_pending(importing=importing, clock=lambda: late)
    assert version is not None
    assert version.is_ready


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("artifact", "/elsewhere"),
        ("engine_options", {"block_size": 32}),
        ("dtype", "float32"),
        ("state", "failed"),
        ("number", 9),
    ],
)
def test_a_ready_version_does_not_change(field: str, value: object) -> None:
    version = make_version()
    setattr(version, field, value)
    with pytest.raises(VersionImmutable, match=field):
        version.save()
    with pytest.raises(VersionImmutable):
        version.delete()


def test_people_may_describe_a_ready_version() -> None:
    version = make_version()
    version.description = "The one that knows more about trains."
    version.save()
    assert Version.objects.get().description.endswith("trains.")


def test_the_database_refuses_a_ready_version_without_an_artifact() -> None:
    with pytest.raises(DatabaseError), transaction.atomic():
        make_version(artifact="")


@pytest.mark.parametrize("name", ["tiny", "tiny/", "tiny/x", "tiny/²", "tiny/99999999999", "/1"])
def test_a_malformed_name_names_no_version(name: str) -> None:
    make_version()
    assert not Version.objects.named(name).exists()
    assert Version.objects.named("tiny/1").exists()
