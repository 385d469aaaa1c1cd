"""Decode steps that were measured, to be held against the floor that was reckoned for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from inference.planner.hardware import Device
from inference.planner.roofline import Roofline, cache_note
from inference.planner.shape import InvalidPlan, ModelShape


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A decode step of ``batch`` sequences: the fastest of several, as rates are the best of several."""

    batch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Steps of one version at one length of its sequences."""

    version: str
    shape: ModelShape
    weights: str
    kv: str
    context: int
    kernel: str
    num_threads: int
    measured_at: str
    steps: tuple[MeasuredStep, ...]

    def floor_s(self, device: Device, batch: float) -> float:
        """The least that such a step takes on ``device``, by the roofline."""
        return self._roofline(device).decode_s(batch, self.context)

    def explain(self, device: Device) -> str:
        """Why some steps were faster than their floor; empty if none was."""
        faster = [step for step in self.steps if step.seconds < self.floor_s(device, step.batch)]
        streamed = [step for step in faster if not self._is_compute_bound(device, step.batch)]
        reasons = []
        if streamed:
            reasons.append(f"{_batches(streamed)} faster than memory allows. ")
            reasons.append(
                cache_note(device, self._roofline(device).streamed_bytes)
                or "The machine had less to do than when it was calibrated."
            )
        if len(faster) > len(streamed):
            computed = [step for step in faster if step not in streamed]
            reasons.append(
                f"{' ' if streamed else ''}{_batches(computed)} faster than the products that were measured: those had "
                "other sizes, or the machine had more to do then."
            )
        return "".join(reasons)

    def _is_compute_bound(self, device: Device, batch: int) -> bool:
        bound = self._roofline(device).compute_bound_batch(self.context)
        return bound is not None and batch >= bound

    def _roofline(self, device: Device) -> Roofline:
        return Roofline(device, self.shape, self.weights, self.kv)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; ``from_dict`` gives an equal object back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from ``to_dict``.

        Raises:
            InvalidPlan: something is missing.
        """
        try:
            values = dict(data)
            values["shape"] = ModelShape(**values["shape"])
            values["steps"] = tuple(MeasuredStep(**each) for each in values["steps"])
            return cls(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise InvalidPlan(
                "measurement",
                f"The measured steps are damaged ({error!r}). Measure again with `manage.py plan --measure`.",
            ) from error


def _batches(steps: Sequence[MeasuredStep]) -> str:
    numbers = ", ".join(str(step.batch) for step in steps)
    return f"Steps of batch {numbers} were"
