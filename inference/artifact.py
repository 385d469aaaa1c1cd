"""A version on disk: one directory that is written once, whole, and never changes.

It holds ``manifest.json`` (what the model is, and a SHA-256 for every other file), ``model.safetensors``,
``tokenizer.json``, and ``chat_template.jinja`` where the model has one. Its name is the digest of what it holds, so
equal contents have one place. Tensor names are Hugging Face's; a quantised weight is stored in the parts named by
``inference.quantization.SCHEMES``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from io import BufferedReader
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from inference.config import InvalidConfig, ModelConfig

FORMAT = 1
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"

ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1}

# A file is data of a stranger: this bounds what reading one may cost.
MAX_JSON_BYTES = 4 * 2**20

_INCOMING = ".incoming-"
_ABANDONED_AFTER_S = 24 * 3600
_NAME_LENGTH = 16
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")

Progress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, what: str) -> None:
    """Report nothing."""


class BrokenArtifact(ValueError):
    """A model on disk that cannot be used; the message names the file, the field, and the mend.

    ``code`` is stable, for programs: ``broken_artifact`` (damaged or inconsistent), ``unsupported_format`` (a kind
    of file we do not read), ``unsupported_model`` (a kind of model we do not run), ``unsafe_artifact`` (it reaches
    outside its directory or wants to run code).
    """

    def __init__(
        self, file: str, field: str, problem: str, mend: str, *, code: str = "broken_artifact"
    ) -> None:
        where = f"{file}: {field}" if field else file
        super().__init__(f"{where}: {problem} {mend}")
        self.file = file
        self.field = field
        self.code = code


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written: ``read`` gives its bytes in order, in pieces, each time it is called."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Iterable[npt.NDArray[Any]]]

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that ``write_artifact`` needs to know; ``chat_template`` None: the model has none."""

    model: ModelConfig
    tensors: Sequence[NewTensor]
    tokenizer: str
    chat_template: str | None
    quantization: str
    stored_dtype: str
    num_parameters: int
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an artifact holds.

    ``quantization`` is ``none`` or the narrowest scheme of ``SCHEMES`` in use; ``stored_dtype`` is that of the tensors
    which are not quantised. ``num_parameters`` counts weights, not codes and scales, and a tied embedding once.
    ``size_bytes`` is the sum over ``files``. ``chat_template_digest`` is empty where the model has no chat
    template. ``source`` tells where it came from, and is the only part that the directory's name does not cover.
    """

    model: ModelConfig
    quantization: str
    stored_dtype: str
    num_parameters: int
    size_bytes: int
    files: Mapping[str, str]
    weights_digest: str
    tokenizer_digest: str
    chat_template_digest: str
    generation_defaults: Mapping[str, Any]
    source: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 over everything that decides an answer: all but ``source``."""
        data = self.to_dict()
        del data["source"]
        return hashlib.sha256(_dumps(data).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping, as in ``manifest.json``."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Rebuild from ``to_dict``.

        Raises:
            BrokenArtifact: a field is missing, unknown, or of the wrong type.
        """
        _check_fields(cls, data)
        try:
            model = ModelConfig.from_dict(data["model"])
        except (InvalidConfig, TypeError) as error:
            raise _bad_manifest("model", str(error)) from error
        values = {name: value for name, value in data.items() if name not in ("format", "model")}
        manifest = cls(model=model, **values)
        manifest._check_digests()
        return manifest

    def _check_digests(self) -> None:
        named = {WEIGHTS: self.weights_digest, TOKENIZER: self.tokenizer_digest}
        if self.chat_template_digest:
            named[CHAT_TEMPLATE] = self.chat_template_digest
        if self.files != named:
            raise _bad_manifest("files", "they do not agree with the digests beside them.")
        for name, digest in named.items():
            if not _SHA256.match(digest):
                raise _bad_manifest("files", f"{digest!r} of {name} is no SHA-256.")


def read_manifest(path: Path) -> Manifest:
    """What the artifact at ``path`` says it holds; ``verify`` also proves it.

    Raises:
        BrokenArtifact: there is no manifest, or it is not a valid one.
    """
    return Manifest.from_dict(read_json(path / MANIFEST))


def verify(path: Path) -> Manifest:
    """Prove the artifact at ``path``: hash every file again.

    Raises:
        BrokenArtifact: a file is missing, is not a regular file, or differs from its digest.
    """
    manifest = read_manifest(path)
    if path.resolve().name != (expected := manifest.digest[:_NAME_LENGTH]):
        raise BrokenArtifact(
            path.name, "", f"its contents are those of {expected}.", "Import the model again."
        )
    for name, digest in sorted(manifest.files.items()):
        with open_regular(path / name) as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != digest:
            raise BrokenArtifact(
                name, "", "its SHA-256 is not the manifest's.", "Import the model again."
            )
    return manifest


def write_artifact(root: Path, contents: Contents, progress: Progress = no_progress) -> Path:
    """The directory under ``root`` that holds ``contents``, whole and synced to disk.

    Memory holds one piece of one tensor at a time. A crash leaves no half artifact. Writing the same contents again
    gives the same path and changes nothing there; a damaged artifact in its place is refused, not overwritten.

    Raises:
        BrokenArtifact: a tensor's ``read`` refuses, or the place is taken by a damaged artifact.
    """
    root.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(root)
    work = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=root))
    try:
        manifest = _write_files(work, contents, progress)
        return _publish(work, root / manifest.digest[:_NAME_LENGTH])
    finally:
        shutil.rmtree(work, ignore_errors=True)


def derive_artifact(source: Path, root: Path, *, model: ModelConfig, chat_template: str) -> Path:
    """The directory under ``root`` with the weights and tokenizer of a verified ``source``, and another template."""
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=root))
    try:
        for name in (WEIGHTS, TOKENIZER):
            _link_or_copy(source / name, work / name)
        digest = _write_file(work / CHAT_TEMPLATE, [chat_template.encode()])
        manifest = read_manifest(source)
        files = {**manifest.files, CHAT_TEMPLATE: digest}
        size = sum((work / name).stat().st_size for name in files)
        manifest = replace(
            manifest, model=model, files=files, chat_template_digest=digest, size_bytes=size
        )
        _write_file(work / MANIFEST, [_dumps(manifest.to_dict(), indent=2).encode()])
        return _publish(work, root / manifest.digest[:_NAME_LENGTH])
    finally:
        shutil.rmtree(work, ignore_errors=True)


def open_regular(path: Path) -> BufferedReader:
    """The regular file at ``path``, never through a symbolic link.

    Raises:
        BrokenArtifact: it is missing, or is a link, a directory or a device.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        problem, mend = "it is not a regular file.", "Replace it by a copy of the file."
        raise BrokenArtifact(path.name, "", problem, mend, code="unsafe_artifact")
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    except FileNotFoundError as error:
        raise BrokenArtifact(
            path.name, "", "the file is missing.", "Check the path, and copy the model whole."
        ) from error


def read_json(path: Path) -> Any:
    """The JSON value in a file of at most 4 MiB, without duplicate keys, NaN or infinity.

    Raises:
        BrokenArtifact: it is missing, too long, or not such JSON.
    """
    with open_regular(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise BrokenArtifact(
            path.name, "", f"it is longer than {MAX_JSON_BYTES} bytes.", "Shorten it."
        )
    return parse_json(path, text)


def parse_json(path: Path, text: bytes) -> Any:
    """The JSON value in ``text``, which was read from ``path``; as strict as ``read_json``."""

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a key occurs twice")
        return result

    def refuse_constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=refuse_duplicates, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BrokenArtifact(path.name, "", f"no valid JSON: {error}.", "Copy it again.") from error


def _write_files(work: Path, contents: Contents, progress: Progress) -> Manifest:
    texts = {TOKENIZER: contents.tokenizer}
    if contents.chat_template is not None:
        texts[CHAT_TEMPLATE] = contents.chat_template
    files = {name: _write_file(work / name, [text.encode()]) for name, text in texts.items()}
    files[WEIGHTS] = _write_file(work / WEIGHTS, _safetensors(contents.tensors, progress))
    manifest = Manifest(
        model=contents.model,
        quantization=contents.quantization,
        stored_dtype=contents.stored_dtype,
        num_parameters=contents.num_parameters,
        size_bytes=sum((work / name).stat().st_size for name in files),
        files=files,
        weights_digest=files[WEIGHTS],
        tokenizer_digest=files[TOKENIZER],
        chat_template_digest=files.get(CHAT_TEMPLATE, ""),
        generation_defaults=contents.generation_defaults,
        source=contents.source,
    )
    _write_file(work / MANIFEST, [_dumps(manifest.to_dict(), indent=2).encode()])
    return manifest


def _safetensors(tensors: Sequence[NewTensor], progress: Progress) -> Iterable[bytes | memoryview]:
    # Widest items first keeps every tensor aligned to its item size, for readers that map the file.
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_SIZES[tensor.dtype], tensor.name))
    offsets = accumulate((tensor.num_bytes for tensor in ordered), initial=0)
    header = {
        tensor.name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": place}
        for tensor, place in zip(ordered, pairwise(offsets), strict=True)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for done, tensor in enumerate(ordered):
        progress(done, len(ordered), tensor.name)
        yield from _checked_pieces(tensor)
    progress(len(ordered), len(ordered), "weights written")


def _checked_pieces(tensor: NewTensor) -> Iterable[memoryview]:
    num_bytes = 0
    for piece in tensor.read():
        num_bytes += piece.nbytes
        yield np.ascontiguousarray(piece).data
    if num_bytes != tensor.num_bytes:
        raise RuntimeError(f"{tensor.name} gave {num_bytes} bytes instead of {tensor.num_bytes}.")


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # Another file system, or one without links.
        shutil.copyfile(source, target, follow_symlinks=False)


def _publish(work: Path, path: Path) -> Path:
    work.chmod(0o755)
    _sync_directory(work)
    try:
        work.rename(path)
    except OSError:
        # A directory that is not empty cannot be replaced: these contents are there already.
        if not path.exists():
            raise
        verify(path)
    _sync_directory(path.parent)
    return path


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(root: Path) -> None:
    # An import that was killed leaves its directory behind; none runs for a day.
    for path in root.glob(f"{_INCOMING}*"):
        if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def _check_fields(manifest: type[Manifest], data: Any) -> None:
    if not isinstance(data, dict):
        raise _bad_manifest("", "it is not an object.")
    if data.get("format") != FORMAT:
        raise _bad_manifest("format", f"{data.get('format')!r} is not {FORMAT}.")
    types = {
        field.name: {"str": str, "int": int}.get(str(field.type), dict)
        for field in fields(manifest)
    }
    if wrong := sorted(data.keys() ^ {*types, "format"}):
        raise _bad_manifest(", ".join(wrong), "missing or unknown.")
    for name, kind in types.items():
        if type(data[name]) is not kind:
            raise _bad_manifest(name, f"it must be of type {kind.__name__}.")


def _bad_manifest(field: str, problem: str) -> BrokenArtifact:
    return BrokenArtifact(MANIFEST, field, problem, "Import the model again.")


def _dumps(data: Any, indent: int | None = None) -> str:
    return json.dumps(data, indent=indent, sort_keys=True, allow_nan=False)
