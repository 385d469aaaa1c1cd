"""What somebody wants to register, and whether it can be: form, REST and command ask here, and hear the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError

from controlplane.errors import DomainError
from controlplane.registry.models import Version, validate_link, validate_slug
from controlplane.registry.runtimes import DIGEST, INTERPRETER, inspect
from controlplane.registry.sources import SourceRefused, find_directory, find_file
from inference.config import EngineConfig, InvalidConfig
from inference.runtime import OURS, RuntimeRefused

# The libraries whose release can change a token.
RUNTIME_PACKAGES = ("tatkal", "torch", "numpy", "tokenizers", "safetensors", "jinja2")
RUNTIME_FIELDS = ("python", "machine", *RUNTIME_PACKAGES)
MAX_RUNTIME_VALUE = 64
MAX_INTERPRETER = 1024
MAX_TEXT = 10_000
MAX_LINK = 500
# What weights can be stored in; a version computes in any of ``Version.Dtype``.
STORED_DTYPES = ("bfloat16", "float32")

Kind = Version.SourceKind


class InvalidVersion(DomainError):
    """A version cannot be registered as described; ``field`` names the part that is wrong."""

    code = "invalid_version"
    status = HTTPStatus.BAD_REQUEST

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, details={"errors": {field: [message]}})
        self.field = field


@dataclass(frozen=True, slots=True)
class Source:
    """Where a version's weights come from, and how they are taken over.

    ``kind`` is ``gguf`` (``location`` is a file), ``huggingface`` (a directory) or ``artifact`` (a ready version,
    ``model/number``, whose weights are shared). ``keep_quantized`` stores the weights as they are quantised in a GGUF
    file; otherwise they are stored in ``dtype``. ``chat_template`` is a file that replaces the template of shared
    weights.
    """

    kind: str
    location: str
    dtype: str = "bfloat16"
    keep_quantized: bool = False
    chat_template: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """A version to be: what decides its answers, and what people say about it.

    ``parent`` is the name of the version it was made from. ``runtime`` overrides what this machine would record; with an
    ``interpreter``, the directory of a virtual environment, the version runs under that one, and it says itself what it has.
    """

    model: str
    source: Source
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, str] = field(default_factory=dict)
    description: str = ""
    notes: str = ""
    parent: str = ""
    run_link: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the names in a draft lead to: real paths, or the version that shares its weights; the parent; the runtime."""

    location: str
    chat_template: str
    parent: Version | None
    runtime: Mapping[str, str]


def check(draft: Draft, roots: Sequence[Path], runtime_roots: Sequence[Path]) -> Checked:
    """Everything that can be known before the import: names, paths, options, lineage.

    Raises:
        InvalidVersion: something cannot work; the message names the field, the value and the mend.
    """
    _check_model(draft.model)
    _check_source(draft.source)
    _check_options(draft)
    _check_runtime(draft.runtime)
    _check_texts(draft)
    base = _find_base(draft.source)
    location = base.name if base else _find_source(draft.source, roots)
    template = draft.source.chat_template
    return Checked(
        location=location,
        chat_template=_find("chat_template", find_file, template, roots) if template else "",
        parent=_find_version("parent", draft.parent) if draft.parent else base,
        runtime=_complete_runtime(draft.runtime, runtime_roots),
    )


def _check_model(name: str) -> None:
    try:
        validate_slug(name)
    except ValidationError as error:
        raise InvalidVersion("model", f"Model name {name!r}: {error.messages[0]}") from error
    if len(name) > 64:
        raise InvalidVersion("model", f"Model name {name!r} has more than 64 characters.")


def _check_source(source: Source) -> None:
    if source.kind not in Kind.values:
        raise InvalidVersion(
            "source_kind",
            f"Source kind {source.kind!r} must be one of {', '.join(Kind.values)}.",
        )
    if source.dtype not in Version.Dtype.values:
        raise InvalidVersion(
            "dtype", f"dtype={source.dtype!r} must be one of {', '.join(Version.Dtype.values)}."
        )
    if source.keep_quantized and source.kind != Kind.GGUF:
        raise InvalidVersion(
            "keep_quantized", "Only the blocks of a GGUF file can be kept quantised; leave it off."
        )
    is_stored = source.kind != Kind.ARTIFACT and not source.keep_quantized
    if is_stored and source.dtype not in STORED_DTYPES:
        raise InvalidVersion(
            "dtype",
            f"Weights are stored in {' or '.join(STORED_DTYPES)}, not in {source.dtype}. Register them so first, "
            f"and then again with {source.dtype} from the weights of that version.",
        )
    if source.chat_template and source.kind != Kind.ARTIFACT:
        raise InvalidVersion(
            "chat_template",
            "A file brings its own template. Register it first, and then again from the weights of that version "
            "with this template.",
        )


def _check_options(draft: Draft) -> None:
    options = draft.engine_options
    if not isinstance(options, Mapping):
        raise InvalidVersion("engine_options", "Engine options must be a JSON object.")
    if "dtype" in options:
        raise InvalidVersion("engine_options", "Engine options: set dtype in its own field.")
    # A dataclass takes any type; 1.5 or true would pass its range checks, and fail in the slot.
    types = {each.name: each.type for each in fields(EngineConfig)}
    for name, value in options.items():
        if types.get(name) == "int" and type(value) is not int:
            raise InvalidVersion(
                "engine_options", f"Engine options: {name}={value!r} must be a whole number."
            )
    try:
        EngineConfig(artifact=Path("/"), dtype=draft.source.dtype).with_options(options)
    except (InvalidConfig, TypeError) as error:
        raise InvalidVersion("engine_options", f"Engine options cannot work: {error}") from error


def _check_runtime(runtime: Mapping[str, Any]) -> None:
    if not isinstance(runtime, Mapping):
        raise InvalidVersion("runtime", "The runtime must be a JSON object.")
    known = (INTERPRETER, *RUNTIME_FIELDS)
    if unknown := sorted(set(runtime) - set(known)):
        raise InvalidVersion(
            "runtime", f"Runtime fields {unknown} are not known; known are {', '.join(known)}."
        )
    if INTERPRETER in runtime and len(runtime) > 1:
        raise InvalidVersion(
            "runtime",
            "Runtime: an interpreter says itself what it has; leave the other fields out.",
        )
    for name, value in runtime.items():
        longest = MAX_INTERPRETER if name == INTERPRETER else MAX_RUNTIME_VALUE
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise InvalidVersion(
                "runtime",
                f"Runtime {name}={value!r} must be a release such as '2.9.1', in quotation marks.",
            )


def _complete_runtime(runtime: Mapping[str, str], roots: Sequence[Path]) -> dict[str, str]:
    """What a version records of its runtime: as it was told, or as its interpreter tells."""
    if INTERPRETER not in runtime:
        return dict(runtime)
    try:
        facts = inspect(runtime[INTERPRETER], roots)
    except RuntimeRefused as error:
        raise InvalidVersion("runtime", str(error)) from error
    packages = {
        name: facts.packages.get(name, "absent") for name in RUNTIME_PACKAGES if name != OURS
    }
    found = {"python": facts.python, "machine": facts.machine, DIGEST: facts.digest}
    return {INTERPRETER: runtime[INTERPRETER], **found, **packages}


def _check_texts(draft: Draft) -> None:
    for name in ("description", "notes"):
        if len(getattr(draft, name)) > MAX_TEXT:
            raise InvalidVersion(name, f"{name} is longer than {MAX_TEXT} characters; shorten it.")
    if not draft.run_link:
        return
    try:
        validate_link(draft.run_link)
    except ValidationError as error:
        raise InvalidVersion(
            "run_link", f"Run link {draft.run_link[:100]!r} must be an http or https address."
        ) from error
    if len(draft.run_link) > MAX_LINK:
        raise InvalidVersion("run_link", f"Run link is longer than {MAX_LINK} characters.")


def _find_base(source: Source) -> Version | None:
    if source.kind != Kind.ARTIFACT:
        return None
    base = _find_version("source", source.location)
    if not base.is_ready:
        raise InvalidVersion(
            "source", f"Version {base.name} is {base.state}; wait until it is ready."
        )
    return base


def _find_version(field: str, name: str) -> Version:
    version = Version.objects.select_related("model").named(name).first()
    if version is None:
        raise InvalidVersion(
            field, f"There is no version {name!r}; name one as model/number, such as chat/3."
        )
    return version


def _find_source(source: Source, roots: Sequence[Path]) -> str:
    find = find_file if source.kind == Kind.GGUF else find_directory
    return _find("source", find, source.location, roots)


def _find(
    field: str, find: Callable[[str, Sequence[Path]], Path], path: str, roots: Sequence[Path]
) -> str:
    try:
        return str(find(path, roots))
    except SourceRefused as error:
        raise InvalidVersion(field, str(error)) from error
