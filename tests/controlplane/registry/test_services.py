"""Registering versions, and the way of a version from its source to READY or FAILED."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from controlplane.events.models import Event
from controlplane.registry import imports, services
from controlplane.registry.drafts import Draft, InvalidVersion, Source
from controlplane.registry.models import Model, Version, VersionQuerySet
from tests.factories import NOW, make_version

pytestmark = pytest.mark.django_db

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


@pytest.fixture(autouse=True)
def root(tmp_path: Path, settings: Any) -> Path:
    """The one allowed root, with a file and a directory that could be models."""
    root = tmp_path / "models"
    (root / "tiny-hf").mkdir(parents=True)
    (root / "tiny-hf" / "config.json").write_text("{}")
    (root / "tiny.gguf").write_bytes(b"GGUF")
    settings.MODEL_ROOTS = (root,)
    return root


@pytest.fixture
def register(root: Path) -> Callable[..., Version]:
    """Registers a version of ``tiny`` from the file, unless told otherwise."""

    def call(**fields: Any) -> Version:
        values: dict[str, Any] = {
            "model": "tiny",
            "source": Source("gguf", str(root / "tiny.gguf")),
        } | fields
        return services.register(draft=Draft(**values), actor="ada", now=NOW)

    return call


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


def test_versions_of_a_model_are_numbered_without_gaps(register: Callable[..., Version]) -> None:
    assert [register().number for _ in range(3)] == [1, 2, 3]
    assert register(model="other").number == 1
    assert Model.objects.count() == 2


def test_registering_is_recorded(register: Callable[..., Version], root: Path) -> None:
    version = register()
    assert version.state == Version.State.PENDING
    event = Event.objects.about("version:tiny/1").get()
    assert (event.type, event.actor) == ("version.registered", "ada")
    assert event.data["source"] == str(root / "tiny.gguf")
    assert Event.objects.about("model:tiny").get().type == "model.created"


def test_a_model_is_created_once_and_by_a_good_name() -> None:
    made = services.create_model(name="chat", description="For talks.", actor="ada", now=NOW)
    assert (made.name, made.description) == ("chat", "For talks.")
    with pytest.raises(services.ModelExists, match="'chat' exists already"):
        services.create_model(name="chat", description="", actor="ada", now=NOW)
    with pytest.raises(services.InvalidModel, match="'Chat'"):
        services.create_model(name="Chat", description="", actor="ada", now=NOW)


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        ({"model": "Tiny"}, "model", "Model name 'Tiny'"),
        ({"model": "a/b"}, "model", "Model name 'a/b'"),
        ({"model": "a" * 65}, "model", "64 characters"),
        ({"source": Source("onnx", "/x")}, "source_kind", "Source kind 'onnx'"),
        ({"source": Source("gguf", "/x", dtype="int3")}, "dtype", "dtype='int3'"),
        ({"source": Source("gguf", "/x", dtype="float16")}, "dtype", "bfloat16 or float32"),
        ({"source": Source("huggingface", "/x", keep_quantized=True)}, "keep_quantized", "GGUF"),
        ({"source": Source("gguf", "/x", chat_template="/t")}, "chat_template", "its own template"),
        ({"source": Source("artifact", "tiny/7")}, "source", "no version 'tiny/7'"),
        ({"source": Source("artifact", "waiting/1")}, "source", "is pending"),
        ({"engine_options": {"block_sise": 16}}, "engine_options", "block_sise"),
        ({"engine_options": {"block_size": 0}}, "engine_options", "block_size=0"),
        ({"engine_options": {"block_size": "many"}}, "engine_options", "block_size='many'"),
        ({"engine_options": {"block_size": 1.5}}, "engine_options", "block_size=1.5"),
        ({"engine_options": {"block_size": True}}, "engine_options", "block_size=True"),
        ({"engine_options": {"dtype": "float32"}}, "engine_options", "its own field"),
        ({"engine_options": [1]}, "engine_options", "JSON object"),
        ({"runtime": {"torhc": "2"}}, "runtime", "torhc"),
        ({"runtime": {"torch": 2}}, "runtime", "quotation marks"),
        ({"runtime": "2.9"}, "runtime", "JSON object"),
        ({"parent": "tiny/7"}, "parent", "no version 'tiny/7'"),
        ({"parent": "tiny"}, "parent", "no version 'tiny'"),
        ({"run_link": "javascript:alert(1)"}, "run_link", "http or https"),
        ({"notes": "x" * 10_001}, "notes", "shorten it"),
    ],
)
def test_what_cannot_work_is_refused_by_field(
    register: Callable[..., Version], fields: dict[str, Any], field: str, told: str
) -> None:
    make_version(model="waiting", state="pending")
    with pytest.raises(InvalidVersion, match=told) as caught:
        register(**fields)
    assert caught.value.field == field
    assert not Version.objects.filter(model__name="tiny").exists()


def test_lineage_is_kept(register: Callable[..., Version]) -> None:
    parent = make_version(model="base")
    version = register(
        parent=parent.name, run_link="https://mlflow.test/#/runs/7", notes="Trained twice."
    )
    version.refresh_from_db()
    assert version.parent == parent
    assert list(parent.children.all()) == [version]
    assert (version.run_link, version.notes) == ("https://mlflow.test/#/runs/7", "Trained twice.")


def test_an_imported_version_is_ready_with_everything_the_manifest_says(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    root: Path,
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
    assert version.import_progress == {}
    assert calls == [
        ["gguf", str(root / "tiny.gguf"), "--root", str(importing.root), "--dtype", "bfloat16"]
    ]
    assert Event.objects.about("version:tiny/1").filter(type="version.ready").exists()


def test_a_quantised_source_is_kept_as_it_is_when_asked(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    root: Path,
) -> None:
    calls = importer(MANIFEST | {"quantization": "int4"})
    register(source=Source("gguf", str(root / "tiny.gguf"), keep_quantized=True))
    version = services.import_pending(importing=importing, clock=clock)
    assert version is not None
    assert version.quantization == "int4"
    assert calls[0][-1] == "--keep-quantized"


def test_a_refused_source_fails_the_version_with_the_reason(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    root: Path,
) -> None:
    importer(imports.ImportFailed("unsupported_model", "family 'x' is not supported."))
    register()
    version = services.import_pending(importing=importing, clock=clock)
    assert version is not None
    assert version.state == Version.State.FAILED
    assert version.state_reason == "unsupported_model: family 'x' is not supported."
    assert services.import_pending(importing=importing, clock=clock) is None


def test_an_import_that_was_told_to_stop_begins_again(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    root: Path,
) -> None:
    importer(imports.ImportFailed("interrupted", "told to stop", may_retry=True))
    register()
    services.import_pending(importing=importing, clock=clock)
    assert Version.objects.get().state == Version.State.PENDING
    importer(MANIFEST)
    services.import_pending(importing=importing, clock=clock)
    assert Version.objects.get().is_ready


def test_of_two_importers_one_takes_the_version(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    root: Path,
) -> None:
    importer(MANIFEST)
    version = register()
    Version.objects.update(state=Version.State.IMPORTING, import_started_at=NOW)
    assert services.import_version(version=version, importing=importing, clock=clock) is None
    assert services.import_pending(importing=importing, clock=clock) is None


def test_while_one_import_runs_no_other_begins(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    root: Path,
) -> None:
    importer(MANIFEST)
    running, waiting = register(), register()
    Version.objects.filter(pk=running.pk).update(
        state=Version.State.IMPORTING, import_started_at=NOW
    )
    assert services.import_pending(importing=importing, clock=clock) is None
    Version.objects.filter(pk=running.pk).update(state=Version.State.FAILED)
    assert services.import_pending(importing=importing, clock=clock) == waiting


def test_an_import_that_begins_between_two_looks_is_seen(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importer(MANIFEST)
    first, second = register(), register()
    look = VersionQuerySet.importing

    def be_slow(versions: VersionQuerySet, **alive: datetime) -> VersionQuerySet:
        """Another importer takes the first version, and ends, after we chose it."""
        monkeypatch.setattr(VersionQuerySet, "importing", look)
        assert services.import_pending(importing=importing, clock=clock) == first
        return look(versions, **alive)

    monkeypatch.setattr(VersionQuerySet, "importing", be_slow)
    assert services.import_pending(importing=importing, clock=clock) is None
    assert Version.objects.get(pk=second.pk).state == Version.State.PENDING


def test_an_import_of_a_release_without_a_heartbeat_is_taken_when_none_can_be_running(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    root: Path,
) -> None:
    importer(MANIFEST)
    register()
    Version.objects.update(state=Version.State.IMPORTING, import_started_at=NOW)
    late = NOW + timedelta(seconds=importing.limits.timeout_s + 61)
    version = services.import_pending(importing=importing, clock=lambda: late)
    assert version is not None
    assert version.is_ready


def test_the_same_weights_are_registered_again_with_other_options(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    root: Path,
) -> None:
    calls = importer(MANIFEST)
    base = make_version(artifact="/artifacts/base")
    (root / "new.jinja").write_text("{{ messages }}")
    source = Source("artifact", base.name, dtype="float32", chat_template=str(root / "new.jinja"))
    version = register(
        source=source, engine_options={"block_size": 32}, runtime={"torch": "2.10.0"}
    )
    assert version.parent == base, "what shares weights descends from their owner"
    imported = services.import_pending(importing=importing, clock=clock)
    assert imported is not None
    assert imported.is_ready
    assert imported.runtime["torch"] == "2.10.0"
    assert imported.runtime["numpy"] == services.current_runtime()["numpy"]
    assert calls == [
        [
            "artifact", "/artifacts/base", "--root", str(importing.root), "--chat-template",
            str(root / "new.jinja"),
        ]
    ]  # fmt: skip


def test_progress_is_written_at_most_once_a_second(
    importing: services.Importing,
    register: Callable[..., Version],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    moment = [100.0]
    monkeypatch.setattr("controlplane.registry.services.time.monotonic", lambda: moment[0])

    def run(
        arguments: list[str], *, on_progress: Callable[[imports.Progress], None], **_: object
    ) -> imports.ImportReport:
        for done in range(4):
            on_progress(imports.Progress(done, 4, f"layer {done}"))
            seen.append(Version.objects.get().import_progress.get("done"))
            moment[0] += 0.6
        return imports.ImportReport(Path("/artifacts/abc"), MANIFEST)

    monkeypatch.setattr(imports, "run_import", run)
    register()
    version = services.import_pending(importing=importing, clock=clock)
    assert seen == [0, 0, 2, 2]
    assert version is not None
    assert version.import_progress == {}


def test_a_source_that_leads_out_by_now_is_not_imported(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    root: Path,
    tmp_path: Path,
) -> None:
    calls = importer(MANIFEST)
    register()
    (tmp_path / "secret").write_bytes(b"GGUF")
    (root / "tiny.gguf").unlink()
    (root / "tiny.gguf").symlink_to(tmp_path / "secret")
    version = services.import_pending(importing=importing, clock=clock)
    assert version is not None
    assert version.state == Version.State.FAILED
    assert version.state_reason.startswith("source_refused: ")
    assert str(root) in version.state_reason
    assert calls == []


def test_a_template_that_is_gone_by_now_fails_the_version(
    importing: services.Importing,
    importer: Callable[[Any], list[list[str]]],
    register: Callable[..., Version],
    root: Path,
) -> None:
    importer(MANIFEST)
    template = root / "new.jinja"
    template.write_text("x")
    register(source=Source("artifact", make_version().name, chat_template=str(template)))
    template.unlink()
    version = services.import_pending(importing=importing, clock=clock)
    assert version is not None
    assert "new.jinja" in version.state_reason
