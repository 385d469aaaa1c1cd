"""Runs of an engine whose logits are kept, bit by bit, by request and position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from inference.config import EngineConfig
from inference.engine.choices import sequence_id
from inference.engine.llm_engine import LLMEngine
from inference.engine.plan import StepPlan
from inference.engine.runner import Runner
from inference.protocol import SamplingParams

SEEDED = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)

Prompts = Mapping[str, list[int]]


@dataclass(slots=True)
class Answers:
    """What each request was told: its tokens, and the bytes of the logits behind each of them."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], bytes] = field(default_factory=dict)
    num_preemptions: int = 0
    num_swaps: int = 0
    num_cached_tokens: int = 0


def seeded(name: str) -> SamplingParams:
    """How the request of this name is sampled: its number is the seed."""
    return replace(SEEDED, seed=int(name[1:]))


def load(artifact: Path, kind: str, **options: Any) -> LLMEngine:
    """An engine with much memory and one thread, unless ``options`` say otherwise."""
    values: dict[str, Any] = {
        "dtype": "float32" if kind in ("float32", "torch") else "bfloat16",
        "kernel": "torch" if kind == "torch" else "native",
        "num_threads": 1,
        "num_blocks": 400,
        "long_prefill_tokens": 512,
    }
    return LLMEngine.load(EngineConfig(artifact, **{**values, **options}))


def run(
    engine: LLMEngine,
    prompts: Prompts,
    answers: Answers | None = None,
    *,
    num_arriving: int = 1000,
    n: int = 1,
    sampling: SamplingParams | None = None,
) -> Answers:
    """Add what ``prompts`` get to ``answers``, ``n`` choices each; ``num_arriving`` arrive before each step."""
    answers = answers or Answers()
    inner = engine._runner
    engine._runner = _Recorder(inner, answers)  # type: ignore[assignment]
    waiting = list(prompts.items())
    while waiting or engine.has_unfinished:
        for name, prompt in waiting[:num_arriving]:
            engine.add_request(name, prompt, sampling or seeded(name), n=n)
        del waiting[:num_arriving]
        for output in engine.step():
            name = sequence_id(output.request_id, output.choice)
            answers.tokens.setdefault(name, []).append(output.token_id)
            answers.num_cached_tokens += output.num_cached_tokens
    engine._runner = inner
    engine.check_integrity()
    usage = engine.usage()
    answers.num_preemptions, answers.num_swaps = usage.num_preemptions, usage.num_swaps
    return answers


@dataclass(frozen=True, slots=True)
class _Recorder:
    """A runner that keeps what it answers."""

    inner: Runner
    answers: Answers

    def move(self, plan: StepPlan) -> int:
        """As the runner does."""
        return self.inner.move(plan)

    def run(self, plan: StepPlan) -> Tensor:
        """As the runner does, and remember."""
        logits = self.inner.run(plan)
        requests = [row.request for row in plan.rows if row.samples]
        for request, row in zip(requests, logits, strict=True):
            self.answers.logits[request.id, len(request.tokens)] = row.numpy().tobytes()
        return logits


def check(answers: Answers, alone: Answers) -> None:
    """Whether both are the same, to the last bit of each logit."""
    different = _differences(answers.logits, alone.logits)
    assert not different, f"{len(different)} logits differ, first {different[0]}"
    assert answers.tokens == alone.tokens


def _differences(
    left: Mapping[tuple[str, int], bytes], right: Mapping[tuple[str, int], bytes]
) -> Sequence[tuple[str, int]]:
    assert left.keys() == right.keys()
    return [key for key in sorted(left) if left[key] != right[key]]
