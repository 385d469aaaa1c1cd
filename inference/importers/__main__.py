"""The child process that imports a model: a file of a stranger in, one artifact and JSON lines out.

It uses no network and no torch; its parent sets limits of time and memory. Every outcome is one last JSON line on
stdout: ``done`` with exit code 0, ``refused`` with 3 (the input, or the machine) or 4 (our bug).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inference.artifact import BrokenArtifact, read_manifest
from inference.importers.checkpoint import STORED_DTYPES
from inference.importers.derived import import_artifact
from inference.importers.gguf import import_gguf
from inference.importers.huggingface import import_huggingface

logger = logging.getLogger(__name__)

EXIT_DONE, EXIT_REFUSED, EXIT_INTERNAL, EXIT_ABANDONED = 0, 3, 4, 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Import what ``arguments`` name, report on stdout, and return the exit code."""
    options = _parse(arguments)
    if options.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        path = options.run(options)
    except BrokenArtifact as error:
        return _refuse(error.code, str(error))
    except OSError as error:
        return _refuse("io_error", f"{error.filename or options.source}: {error.strerror}.")
    except MemoryError:
        return _refuse(
            "out_of_memory", "The import needs more memory than it may use; raise the limit."
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic of a Rust library is no Exception
        return _refuse_bug(error)
    _say("done", artifact=str(path), manifest=read_manifest(path).to_dict())
    return EXIT_DONE


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m inference.importers", description=__doc__)
    parser.add_argument(
        "--end-with-stdin",
        action="store_true",
        help="end at once, half done, when the standard input ends: whoever waits for the report is gone",
    )
    formats = parser.add_subparsers(required=True, metavar="FORMAT")
    artifact = _add_format(formats, "artifact", "an artifact of ours", _run_artifact)
    artifact.add_argument(
        "--chat-template", type=Path, help="a file that replaces the chat template"
    )
    gguf = _add_format(formats, "gguf", "a GGUF file of the Llama architecture", _run_gguf)
    _add_dtype(gguf)
    gguf.add_argument(
        "--keep-quantized",
        action="store_true",
        help="keep Q4_0, Q4_1 and Q8_0 blocks as they are; nothing is rounded",
    )
    huggingface = _add_format(
        formats, "huggingface", "a Hugging Face directory of the Llama family", _run_huggingface
    )
    _add_dtype(huggingface)
    return parser.parse_args(arguments)


def _add_format(
    formats: Any, name: str, what: str, run: Callable[[argparse.Namespace], Path]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = formats.add_parser(name, help=what)
    parser.add_argument("source", type=Path, help=what)
    parser.add_argument("--root", type=Path, required=True, help="directory of all artifacts")
    parser.set_defaults(run=run)
    return parser


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=sorted(STORED_DTYPES), default="bfloat16")


def _run_artifact(options: argparse.Namespace) -> Path:
    return import_artifact(
        options.source, options.root, chat_template=options.chat_template, progress=_report
    )


def _run_gguf(options: argparse.Namespace) -> Path:
    return import_gguf(
        options.source,
        options.root,
        dtype=options.dtype,
        keep_quantized=options.keep_quantized,
        progress=_report,
    )


def _run_huggingface(options: argparse.Namespace) -> Path:
    return import_huggingface(options.source, options.root, dtype=options.dtype, progress=_report)


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    # An artifact appears under its name only when it is whole.
    os._exit(EXIT_ABANDONED)


def _report(done: int, total: int, what: str) -> None:
    _say("progress", done=done, total=total, what=what)


def _refuse(code: str, message: str) -> int:
    _say("refused", code=code, message=message)
    return EXIT_REFUSED


def _refuse_bug(error: BaseException) -> int:
    # The type alone: a message could carry text of the file.
    logger.error("import failed type=%s", type(error).__name__)
    _say("refused", code="internal", message=f"The importer failed: {type(error).__name__}.")
    return EXIT_INTERNAL


def _say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}, ensure_ascii=True) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
