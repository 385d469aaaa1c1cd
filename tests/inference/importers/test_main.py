"""The child process that imports: one last JSON line, whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inference.artifact import verify
from inference.importers import __main__ as program


def _run(*arguments: str | Path) -> tuple[int, list[dict[str, Any]], str]:
    process = subprocess.run(
        [sys.executable, "-m", "inference.importers", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    return process.returncode, lines, process.stderr


@pytest.mark.slow
def test_an_import_reports_its_progress_and_its_artifact(gguf_path: Path, tmp_path: Path) -> None:
    code, lines, errors = _run("gguf", gguf_path, "--root", tmp_path, "--keep-quantized")

    *progress, last = lines
    assert (code, errors) == (0, "")
    assert {line["event"] for line in progress} == {"progress"}
    written = [line for line in progress if line["total"] == progress[-1]["total"]]
    assert [line["done"] for line in written] == list(range(progress[-1]["total"] + 1))
    assert last["event"] == "done"
    assert last["manifest"] == verify(Path(last["artifact"])).to_dict() | {
        "model": last["manifest"]["model"]
    }
    assert last["manifest"]["quantization"] == "int4"


@pytest.mark.slow
def test_a_broken_file_is_refused_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)

    code, lines, errors = _run("gguf", path, "--root", tmp_path / "root")

    assert (code, errors) == (3, "")
    assert lines == [
        {"event": "refused", "code": "unsupported_format", "message": lines[0]["message"]}
    ]
    assert "broken.gguf: version" in lines[0]["message"]


@pytest.mark.slow
def test_the_program_loads_neither_torch_nor_transformers() -> None:
    heavy = "import inference.importers.__main__, sys; print({'torch', 'transformers'} & set(sys.modules))"

    output = subprocess.run(
        [sys.executable, "-c", heavy], capture_output=True, text=True, timeout=60, check=True
    ).stdout

    assert output == "set()\n"


@pytest.mark.slow
def test_an_import_asks_nothing_of_the_network(gguf_path: Path, tmp_path: Path) -> None:
    # The hook ends the process at the first socket, whichever library opens it.
    watched = (
        "import os, sys; "
        "sys.addaudithook(lambda event, _: event.startswith('socket.') and os._exit(99)); "
        "from inference.importers.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", watched, "gguf", str(gguf_path), "--root", str(tmp_path)]

    process = subprocess.run(command, capture_output=True, timeout=120, check=False)

    assert process.returncode == 0
    opened = [
        sys.executable,
        "-c",
        watched.replace("from inference", "import socket; socket.socket(); from inference"),
    ]
    assert subprocess.run(opened, capture_output=True, timeout=60, check=False).returncode == 99


def test_an_artifact_is_taken_over_by_the_third_command(
    tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "new.jinja"
    template.write_text("{{ messages }}")

    code = program.main(
        [
            "artifact",
            str(tiny_artifact),
            "--root",
            str(tmp_path / "root"),
            "--chat-template",
            str(template),
        ]
    )

    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, done["event"]) == (0, "done")
    assert (
        verify(Path(done["artifact"])).chat_template_digest
        != verify(tiny_artifact).chat_template_digest
    )


def test_a_directory_is_imported_by_the_other_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()

    code = program.main(["huggingface", str(tmp_path / "model"), "--root", str(tmp_path / "root")])

    assert code == 3
    assert "config.json: the file is missing" in json.loads(capsys.readouterr().out)["message"]


@pytest.mark.parametrize(
    ("error", "exit_code", "code"),
    [
        (ValueError("text of the file"), 4, "internal"),
        (MemoryError(), 3, "out_of_memory"),
        (OSError(28, "No space left on device", "/root/x"), 3, "io_error"),
        (type("PanicException", (BaseException,), {})("text of the file"), 4, "internal"),
    ],
)
def test_whatever_else_goes_wrong_is_one_line_as_well(
    error: BaseException,
    exit_code: int,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: Any, **options: Any) -> Path:
        raise error

    monkeypatch.setattr(program, "import_gguf", fail)

    assert program.main(["gguf", "a.gguf", "--root", "root"]) == exit_code

    line = json.loads(capsys.readouterr().out)
    assert (line["event"], line["code"]) == ("refused", code)
    assert "text of the file" not in line["message"]
    if code == "internal":
        assert type(error).__name__ in line["message"]


def test_an_interrupt_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **options: Any) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "import_gguf", interrupt)

    with pytest.raises(KeyboardInterrupt):
        program.main(["gguf", "a.gguf", "--root", "root"])


@pytest.mark.parametrize(
    "arguments", [[], ["zip", "x"], ["gguf", "x"], ["gguf", "x", "--root", "r", "--dtype", "int3"]]
)
def test_wrong_arguments_are_explained(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        program.main(arguments)

    assert caught.value.code == 2
