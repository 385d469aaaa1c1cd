"""One thing wrong in an otherwise sound scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mutant:
    """``mutate`` makes the wrong ``attribute`` from the right one; ``promise`` matches how it is found."""

    target: type
    attribute: str
    mutate: Callable[[Any], Any]
    promise: str

    def __str__(self) -> str:
        return self.mutate.__name__
