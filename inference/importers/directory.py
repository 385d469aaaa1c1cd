"""A directory of a stranger, read as data: no pickles, no code, no way out of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inference.artifact import BrokenArtifact, open_regular, read_json

MAX_FILES = 10_000
MAX_TEXT_BYTES = 128 * 2**20

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npz")
_REMOTE_CODE = ("auto_map", "custom_pipelines")


class ModelDirectory:
    """The files of one model directory, each checked to lie inside it, and remembered when read."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise BrokenArtifact(path.name, "", "no such directory.", "Name a local directory.")
        self._root = path.resolve()
        self._read: set[str] = set()
        for name in self._walk():
            self._check(name)

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self._root.name

    def has(self, name: str) -> bool:
        """Whether the file is there."""
        return (self._root / name).is_file()

    def path(self, name: str) -> Path:
        """Where the file really lies, to be read."""
        self._read.add(name)
        return self._inside(name)

    def json(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        """The JSON object in the file; empty when it is missing and optional."""
        if optional and not self.has(name):
            return {}
        value = read_json(self.path(name))
        if not isinstance(value, dict):
            raise BrokenArtifact(name, "", "it is not a JSON object.", "Copy the file again.")
        for key in _REMOTE_CODE:
            if key in value:
                raise BrokenArtifact(
                    name,
                    key,
                    "it asks to run code that comes with the model; this is never done.",
                    "Import a model of a built-in architecture, without custom code.",
                    code="unsafe_artifact",
                )
        return value

    def text(self, name: str) -> str:
        """The text of the file."""
        with open_regular(self.path(name)) as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
        if len(raw) > MAX_TEXT_BYTES:
            raise BrokenArtifact(
                name, "", f"it is longer than {MAX_TEXT_BYTES} bytes.", "Shorten it."
            )
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BrokenArtifact(name, "", "it is not UTF-8.", "Save it as UTF-8.") from error

    def digest(self) -> str:
        """SHA-256 over the names and digests of all files read, as ``sha256sum`` would list them."""
        lines = []
        for name in sorted(self._read):
            with open_regular(self.path(name)) as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _walk(self) -> Iterator[str]:
        num_files = 0
        for folder, folders, files in os.walk(self._root):
            for name in (*folders, *files):
                num_files += 1
                if num_files > MAX_FILES:
                    raise BrokenArtifact(
                        self._root.name,
                        "",
                        f"it has more than {MAX_FILES} files.",
                        "Remove the rest.",
                    )
                yield str(Path(folder, name).relative_to(self._root))

    def _check(self, name: str) -> None:
        path = self._root / name
        suffix = path.suffix.lower()
        if suffix in _PICKLES:
            raise BrokenArtifact(
                name,
                "",
                "a pickle can run code when it is read, so this format is not accepted.",
                "Convert the weights to safetensors, and remove this file.",
                code="unsupported_format",
            )
        if suffix == ".py":
            raise BrokenArtifact(
                name,
                "",
                "code that comes with a model is never run.",
                "Remove it, if the model is of a built-in architecture.",
                code="unsafe_artifact",
            )
        self._inside(name)

    def _inside(self, name: str) -> Path:
        # Unlike Path.resolve(), realpath() does not raise where links lead in a circle.
        path = Path(os.path.realpath(self._root / name))
        if not path.is_relative_to(self._root):
            raise BrokenArtifact(
                name,
                "",
                "a link leads out of the directory.",
                "Copy the directory with its files, for example by `cp -rL`.",
                code="unsafe_artifact",
            )
        return path
