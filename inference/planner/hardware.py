"""What it runs on: memory, bandwidth and arithmetic of devices, from their makers' data sheets or measured here.

A data sheet gives the most that the parts could do; a calibration gives what this machine did. Rates are those of dense
matrices: makers print twice as much for matrices of which half is zero, and weights are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

from inference.planner.shape import InvalidPlan

GIB: Final = 2**30
THIS_MACHINE: Final = "this-machine"


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one machine.

    ``flops`` is the rate of 16-bit floats. Weights of 8 or 4 bits save bytes and not multiplications: they are widened
    before they are multiplied, so they count at that rate too, unless ``flops_by_weights`` has what was measured.
    ``int8_ops`` is the rate where both factors are integers. ``cache_bytes`` is the last-level cache, 0 if nobody cares.
    """

    name: str
    title: str
    memory_bytes: int
    bandwidth: float
    flops: float
    int8_ops: float
    source: str
    cache_bytes: int = 0
    flops_by_weights: Mapping[str, float] = field(default_factory=dict)
    measured_at: str = ""

    def rate(self, weights: str) -> float:
        """FLOP/s with weights of this format."""
        return self.flops_by_weights.get(weights, self.flops)

    def ridge(self, weights: str = "fp16") -> float:
        """FLOP per byte from which on arithmetic is what limits, not memory.

        Source: Williams, Waterman and Patterson (2009), Commun. ACM 52(4), 65-76, section 3: the ridge point.
        """
        return self.rate(weights) / self.bandwidth


def _device(
    name: str, title: str, gib: int, gb_per_s: float, tflops: float, tops: float, source: str
) -> Device:
    """In the units of data sheets. Their GB of memory are 2**30 bytes; their GB/s and TFLOPS are powers of ten."""
    return Device(name, title, gib * GIB, gb_per_s * 1e9, tflops * 1e12, tops * 1e12, source)


DEVICES: Final[Mapping[str, Device]] = {
    each.name: each
    for each in (
        _device(
            "a100-40gb", "NVIDIA A100 40 GB", 40, 1555, 312, 624,
            "NVIDIA A100 Tensor Core GPU Architecture, table 1: "
            "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf",
        ),
        _device(
            "a100-80gb", "NVIDIA A100 80 GB SXM", 80, 2039, 312, 624,
            "NVIDIA A100 Tensor Core GPU data sheet: https://www.nvidia.com/content/dam/en-zz/Solutions/"
            "Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
        ),
        _device(
            "h100", "NVIDIA H100 SXM", 80, 3350, 989.5, 1979,
            "NVIDIA H100 Tensor Core GPU specifications, halved where printed with sparsity: "
            "https://www.nvidia.com/en-us/data-center/h100/",
        ),
        _device(
            "h200", "NVIDIA H200 SXM", 141, 4800, 989.5, 1979,
            "NVIDIA H200 Tensor Core GPU specifications, halved where printed with sparsity: "
            "https://www.nvidia.com/en-us/data-center/h200/",
        ),
        _device(
            "l4", "NVIDIA L4", 24, 300, 121, 242.5,
            "NVIDIA L4 Tensor Core GPU specifications, halved where printed with sparsity: "
            "https://www.nvidia.com/en-us/data-center/l4/",
        ),
        _device(
            "l40s", "NVIDIA L40S", 48, 864, 362.05, 733,
            "NVIDIA L40S GPU specifications: https://www.nvidia.com/en-us/data-center/l40s/",
        ),
        _device(
            "rtx-4090", "NVIDIA GeForce RTX 4090", 24, 1008, 165.2, 660.6,
            "NVIDIA Ada GPU Architecture, appendix A, 16-bit with 32-bit accumulation: "
            "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        ),
        _device(
            "mi300x", "AMD Instinct MI300X", 192, 5300, 1307.4, 2614.9,
            "AMD Instinct MI300X data sheet: https://www.amd.com/content/dam/amd/en/documents/"
            "instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf",
        ),
    )
}  # fmt: skip
"""Devices by name."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one machine did, when, and how that was measured; the most of several rounds.

    ``flops`` are FLOP/s by the format of the weights. ``memory_bytes`` is all memory of the machine or container.
    ``load`` is how many processes wanted each processor meanwhile: above one, the rates are too low.
    """

    machine: str
    kernel: str
    num_threads: int
    memory_bytes: int
    cache_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    measured_at: str
    method: str
    took_s: float = 0.0
    load: float = 0.0

    @property
    def note(self) -> str:
        """What to think of while reading; empty if nothing."""
        if self.load <= _BUSY:
            return ""
        return (
            f"The machine was busy while it was measured ({self.load:.1f} processes for each processor), so the rates "
            "are too low. Measure again when it has less to do."
        )

    def device(self) -> Device:
        """The machine as a device to plan with."""
        return Device(
            name=THIS_MACHINE,
            title=f"This machine: {self.machine}, {self.num_threads} "
            f"{'thread' if self.num_threads == 1 else 'threads'}",
            memory_bytes=self.memory_bytes,
            bandwidth=self.bandwidth,
            flops=self.flops["bf16"],
            int8_ops=self.flops.get("int8", self.flops["bf16"]),
            source=f"measured {self.measured_at}: {self.method}",
            cache_bytes=self.cache_bytes,
            flops_by_weights=dict(self.flops),
            measured_at=self.measured_at,
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; ``from_dict`` gives an equal object back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from ``to_dict``, also of another release.

        Raises:
            InvalidPlan: a field is missing, or a rate is no positive number.
        """
        known = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        try:
            calibration = cls(**known)
            rates = [calibration.bandwidth, calibration.flops["bf16"], *calibration.flops.values()]
            is_sound = all(float(rate) > 0 for rate in rates) and calibration.memory_bytes > 0
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise InvalidPlan(
                "calibration", f"The calibration is damaged ({error!r}). {_MEND}"
            ) from error
        if not is_sound:
            raise InvalidPlan(
                "calibration", f"The calibration has a rate that is not positive. {_MEND}"
            )
        return calibration


_BUSY = 1.5
_MEND = "Measure again with `manage.py plan --calibrate`."


def find_device(name: str, calibration: Calibration | None = None) -> Device:
    """The device of that name; ``this-machine`` is what ``calibration`` says.

    Raises:
        InvalidPlan: there is no such device, or this machine was never measured.
    """
    if name == THIS_MACHINE:
        if calibration is None:
            raise InvalidPlan(
                "hardware",
                f"hardware={name!r} has not been measured yet. Measure it with `manage.py plan --calibrate`.",
            )
        return calibration.device()
    if name not in DEVICES:
        known = ", ".join([*DEVICES, THIS_MACHINE])
        raise InvalidPlan("hardware", f"hardware={name!r} is not known; use one of {known}.")
    return DEVICES[name]
