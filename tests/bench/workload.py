"""What the engines are asked: pieces of plain text with lengths like those of a chat, the same for all, new each round.

No prompt comes twice in a run, so that no cache of prompts has anything to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from inference.engine.prompt import load_tokenizer
from tests.bench.traffic import Asked

MEDIAN_TOKENS, SIGMA = 80, 0.7
SHORTEST, LONGEST = 16, 256
SINGLE_PROMPT, SINGLE_TOKENS = 64, 128


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and lengths from the text of ``artifact``'s tokens."""

    token_ids: Sequence[int]
    num_requests: int
    longest: int = LONGEST

    @classmethod
    def of(cls, artifact: Path, *, num_requests: int, longest: int = LONGEST) -> Workload:
        """The text is Python's own documentation, which comes with Python."""
        return cls(_encode(artifact), num_requests, longest)

    def requests(self, seed: int, *, text: int = 0) -> list[Asked]:
        """Log-normal lengths of prompt and answer, cut to 16 and ``longest``; another ``text`` keeps the lengths."""
        generator = np.random.default_rng(seed)
        pieces = np.random.default_rng([seed, 2 + text])
        lengths = np.exp(generator.normal(np.log(MEDIAN_TOKENS), SIGMA, (self.num_requests, 2)))
        shaped = np.clip(lengths, SHORTEST, self.longest).astype(int).tolist()
        return [Asked(self._piece(pieces, prompt), answer) for prompt, answer in shaped]

    def single(self, seed: int) -> Asked:
        """One request alone."""
        generator = np.random.default_rng([seed, 1])
        return Asked(self._piece(generator, SINGLE_PROMPT), min(SINGLE_TOKENS, 2 * self.longest))

    def _piece(self, generator: np.random.Generator, length: int) -> tuple[int, ...]:
        start = int(generator.integers(0, len(self.token_ids) - length))
        return tuple(self.token_ids[start : start + length])


@cache
def _encode(artifact: Path) -> tuple[int, ...]:
    text = "\n".join(str(topics[name]) for name in sorted(topics))
    return tuple(load_tokenizer(artifact).encode(text, add_special_tokens=False).ids)
