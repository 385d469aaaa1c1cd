"""Plans in terms of what is here: versions by name, this machine as it was calibrated.

The command, the REST call and the page hand over the same names; what cannot be is told by name, value and mend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from django.conf import settings

from controlplane.errors import DomainError
from controlplane.registry.models import Version
from inference.artifact import BrokenArtifact, Manifest, read_manifest
from inference.calibration import read_calibration, read_steps
from inference.planner.curve import StepCurve
from inference.planner.hardware import Calibration, Device, find_device
from inference.planner.memory import decoder_bytes
from inference.planner.plan import Plan, Question, make_plan
from inference.planner.queueing import Load
from inference.planner.shape import BITS, InvalidPlan, ModelShape, parse_format

SIZES = ("params", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
LOAD = ("rate", "ttft_s", "tpot_s")
PASSED_ON = (
    "block_size", "group_size", "headroom", "batch", "prompt_tokens", "output_tokens", "price_per_hour", "with_standby",
)  # fmt: skip


class PlanRefused(DomainError):
    """Nothing can be planned with a value; ``details`` name it."""

    code = "invalid_plan"
    status = HTTPStatus.BAD_REQUEST

    def __init__(self, error: InvalidPlan) -> None:
        super().__init__(str(error), details={"errors": {error.name: [str(error)]}})
        self.name = error.name


@dataclass(frozen=True, slots=True)
class VersionShape:
    """A version as it is planned with: its shape with the bytes that it has, and what it computes with."""

    shape: ModelShape
    weights: str
    kv: str
    context: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan, and the question with everything that was filled in."""

    question: Question
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return self.plan.to_dict(self.question)


def plan(inputs: Mapping[str, Any]) -> Answer:
    """The plan for ``inputs``; a name that is absent or None has its default.

    A ``version`` stands for the sizes of a model, and gives defaults for formats and context.

    Raises:
        PlanRefused: a value cannot be; it is named, and what would do.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    try:
        question = _question(given)
        return Answer(question, make_plan(question))
    except InvalidPlan as error:
        raise PlanRefused(error) from error


def measured_steps() -> tuple[StepCurve, ...]:
    """Decode steps that were measured on this machine.

    Raises:
        PlanRefused: their file is damaged.
    """
    try:
        return read_steps(settings.TATKAL_HOME)
    except InvalidPlan as error:
        raise PlanRefused(error) from error


def calibration() -> Calibration | None:
    """What this machine can do, if it was measured.

    Raises:
        PlanRefused: its file is damaged.
    """
    try:
        return read_calibration(settings.TATKAL_HOME)
    except InvalidPlan as error:
        raise PlanRefused(error) from error


def describe(version: Version) -> VersionShape:
    """What is planned for ``version``, read from its artifact.

    Raises:
        InvalidPlan: it is not ready, or its artifact cannot be read here.
    """
    if not version.is_ready:
        raise InvalidPlan(
            "version", f"version={version.name!r} is {version.state}; wait until it is ready."
        )
    try:
        manifest = read_manifest(Path(version.artifact))
    except (BrokenArtifact, OSError) as error:
        raise InvalidPlan(
            "version",
            f"version={version.name!r} cannot be looked up: {error} Give the sizes of the model instead.",
        ) from error
    dtype = str(version.engine_options.get("dtype", version.dtype))
    is_packed = manifest.quantization in BITS
    model = manifest.model
    max_model_len = int(version.engine_options.get("max_model_len") or model.context_length)
    kv = parse_format("kv", dtype)
    weight_bytes = (
        manifest.size_bytes
        if is_packed
        else decoder_bytes(model, item_size=BITS[kv] // 8, num_positions=max_model_len)
    )
    return VersionShape(
        shape=ModelShape.of_config(
            model, params=manifest.num_parameters, weight_bytes=weight_bytes
        ),
        weights=manifest.quantization if is_packed else kv,
        kv=kv,
        context=max_model_len,
        manifest=manifest,
    )


def _question(given: Mapping[str, Any]) -> Question:
    question = _model(given)
    return replace(
        question,
        **{name: given[name] for name in PASSED_ON if name in given},
        lengths=tuple(given.get("lengths", ())),
        load=_load(given, question),
    )


def _model(given: Mapping[str, Any]) -> Question:
    device = _device(str(given.get("hardware", "")))
    if name := given.get("version"):
        return _of_version(str(name), given, device)
    sizes = {name: given[name] for name in SIZES if name in given}
    for name in SIZES[:3]:
        if name not in sizes:
            raise InvalidPlan(name, f"{name} is missing; give it, or a version of the registry.")
    weights = parse_format("weights", str(given.get("weights", "fp16")))
    return Question(
        device=device,
        shape=ModelShape.of_sizes(**sizes),
        weights=weights,
        kv=parse_format("kv", str(given.get("kv", "fp16"))),
        context=given.get("context", 2048),
    )


def _of_version(name: str, given: Mapping[str, Any], device: Device) -> Question:
    for size in SIZES:
        if size in given:
            raise InvalidPlan(size, f"{size} comes with version={name!r}; give only one of them.")
    version = Version.objects.named(name).select_related("model").first()
    if version is None:
        raise InvalidPlan(
            "version", f"version={name!r} is not there; versions are named model/number."
        )
    found = describe(version)
    weights = parse_format("weights", str(given.get("weights", found.weights)))
    return Question(
        device=device,
        shape=found.shape if weights == found.weights else found.shape.in_format(),
        weights=weights,
        kv=parse_format("kv", str(given.get("kv", found.kv))),
        context=given.get("context", found.context),
    )


def _device(name: str) -> Device:
    if not name:
        raise InvalidPlan("hardware", "hardware is missing; name a device, for instance a100-40gb.")
    return find_device(name, read_calibration(settings.TATKAL_HOME))


def _load(given: Mapping[str, Any], question: Question) -> Load | None:
    present = [name for name in LOAD if name in given]
    if not present:
        return None
    for name in LOAD:
        if name not in given:
            raise InvalidPlan(
                name, f"{name} is missing; {', '.join(LOAD)} are needed together to count replicas."
            )
    return Load(
        rate=given["rate"],
        ttft_s=given["ttft_s"],
        tpot_s=given["tpot_s"],
        prompt_tokens=given.get("prompt_tokens", question.prompt_tokens),
        output_tokens=given.get("output_tokens", question.output_tokens),
        output_cv2=given.get("output_cv2", 1.0),
    )
