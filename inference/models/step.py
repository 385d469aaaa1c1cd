"""The seam between the engine and whatever computes a model: one step in, logits out.

The engine knows block ids; what lies in a block belongs to the model that reads and writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from inference.models.attention import Span


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of one step: those of ``spans``, in this order; ``logit_rows`` are the ones to answer."""

    token_ids: Sequence[int]
    spans: Sequence[Span]
    logit_rows: Sequence[int]

    def positions(self) -> list[int]:
        """The position of each token."""
        return [position for span in self.spans for position in range(span.start, span.end)]


class StepModel(Protocol):
    """A model that the runner can run."""

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of one KV block of one layer, in items of the cache's dtype."""

    def describe_numerics(self) -> dict[str, str]:
        """Facts that decide how a sum is rounded; where they are equal, so are the results, bit for bit."""

    def compute(self, step: Step, cache: Tensor) -> Tensor:
        """Compute a step's tokens, leave their keys and values in ``cache``, and answer some of them.

        ``cache`` is ``[num_layers, num_blocks, *block_shape]``. A row's answer does not depend on the other rows.

        Returns:
            Float32 logits ``[num_logit_rows, vocab_size]`` of the rows ``logit_rows``.
        """
