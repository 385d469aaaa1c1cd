"""The engine on real weights gives the tokens of Hugging Face transformers, however its steps are cut and shared.

The artifact keeps the GGUF's quantised weights, the oracle dequantises the same GGUF by its own code, and both compute
in float32. So a token may differ only where the oracle's two best logits are closer than the rounding of a forward pass.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.engine.prompt import load_tokenizer
from inference.protocol import SamplingParams

pytestmark = pytest.mark.slow

NUM_OUTPUT_TOKENS = 64
NUM_THREADS = min(os.cpu_count() or 1, 2)
LENGTHS = (5, 6, 7, 15, 16, 17, 31, 33, 50, 64, 100, 127, 128, 129, 200, 256, 300, 450, 700, 900)
TOLERANCE = 1e-4
NUM_SCORED = 5  # those with short prompts
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers would say after each prefix: its best token, and by how much it leads the second.

    ``logprobs`` are those of the engine's tokens, whichever is the best.
    """

    tokens: Tokens
    leads: list[float]
    logprobs: list[float]


@pytest.fixture(scope="module")
def prompts(real_artifact: Path) -> list[Tokens]:
    """Twenty pieces of English that every Python comes with, of 5 to 900 tokens."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = load_tokenizer(real_artifact).encode(text[:200_000], add_special_tokens=False).ids
    starts = [2000 * index for index in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def alone(real_artifact: Path, prompts: list[Tokens]) -> list[Tokens]:
    """Each prompt's output with the engine to itself."""
    engine = _load(real_artifact)
    return [_run(engine, {0: prompt})[0] for prompt in prompts]


@pytest.fixture(scope="module")
def references(gguf_path: Path, prompts: list[Tokens], alone: list[Tokens]) -> list[Reference]:
    """One forward pass of transformers over each prompt with the engine's output.

    As long as the outputs agree, this is what greedy generation would give; after a difference nothing is compared.
    """
    torch.set_num_threads(NUM_THREADS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
        )
    return [_refer(model, *each) for each in zip(prompts, alone, strict=True)]


def test_the_prompts_differ(prompts: list[Tokens]) -> None:
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    assert all(left[:5] != right[:5] for left, right in pairwise(prompts))


def test_one_request_alone(
    references: list[Reference], alone: list[Tokens], capsys: pytest.CaptureFixture[str]
) -> None:
    _check("alone", alone, references, capsys)


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_prompts_in_chunks(
    real_artifact: Path,
    prompts: list[Tokens],
    references: list[Reference],
    alone: list[Tokens],
    capsys: pytest.CaptureFixture[str],
    chunk: int,
) -> None:
    engine = _load(real_artifact, long_prefill_tokens=chunk)
    outputs = _run(engine, dict(enumerate(prompts)))
    _check(f"chunks of {chunk}", outputs, references, capsys)
    assert outputs == alone


def test_all_in_one_batch_with_random_arrivals(
    real_artifact: Path,
    prompts: list[Tokens],
    references: list[Reference],
    alone: list[Tokens],
    capsys: pytest.CaptureFixture[str],
) -> None:
    order = random.Random(5)  # noqa: S311 - arrivals of a test
    arriving = list(enumerate(prompts))
    order.shuffle(arriving)
    outputs = _run(_load(real_artifact), dict(arriving), arrivals=order)
    _check("random arrivals", outputs, references, capsys)
    assert outputs == alone


@pytest.mark.parametrize("swap_bytes", [0, 2**28])
def test_a_pool_so_small_that_requests_give_way(
    real_artifact: Path,
    prompts: list[Tokens],
    references: list[Reference],
    alone: list[Tokens],
    capsys: pytest.CaptureFixture[str],
    swap_bytes: int,
) -> None:
    num_blocks = 1 + (900 + NUM_OUTPUT_TOKENS) // 16 + 2
    engine = _load(real_artifact, num_blocks=num_blocks, swap_bytes=swap_bytes)
    outputs = _run(engine, dict(enumerate(prompts)))
    usage = engine.usage()
    assert usage.num_preemptions > 0
    assert (usage.num_swaps > 0) == (swap_bytes > 0)
    name = f"{usage.num_preemptions} preemptions, {usage.num_swaps} by swap"
    _check(name, outputs, references, capsys)
    assert outputs == alone


def test_prompts_whose_blocks_are_cached(
    real_artifact: Path,
    prompts: list[Tokens],
    references: list[Reference],
    alone: list[Tokens],
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = _load(real_artifact, long_prefill_tokens=50)
    _run(engine, dict(enumerate(prompts)))
    computed = engine.telemetry.totals.num_prefill_tokens
    outputs = _run(engine, dict(enumerate(prompts)))
    assert engine.telemetry.totals.num_prefill_tokens - computed < 0.2 * computed
    _check("prompts seen before", outputs, references, capsys)
    assert outputs == alone


def test_answers_are_scored_as_transformers_would(
    real_artifact: Path, prompts: list[Tokens], references: list[Reference], alone: list[Tokens]
) -> None:
    engine = _load(real_artifact)
    for number in range(NUM_SCORED):
        engine.add_request(str(number), prompts[number], GREEDY, scored_token_ids=alone[number])
    scores: dict[int, Any] = {}
    while engine.has_unfinished:
        scores |= {int(output.request_id): output.score for output in engine.step()}

    for number, reference in enumerate(references[:NUM_SCORED]):
        assert scores[number].logprobs == pytest.approx(reference.logprobs, abs=10 * TOLERANCE)
        assert scores[number].num_agreed == NUM_OUTPUT_TOKENS  # the answer is its own, and greedy


def test_the_comparison_notices_a_wrong_token(
    references: list[Reference], alone: list[Tokens], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [list(tokens) for tokens in alone]
    wrong[3][40] += 1
    with pytest.raises(AssertionError, match="prompt 3, token 40"):
        _check("a wrong token", wrong, references, capsys)


def _load(artifact: Path, **options: Any) -> LLMEngine:
    return LLMEngine.load(
        EngineConfig(
            artifact,
            dtype="float32",
            kernel="torch",
            num_threads=NUM_THREADS,
            max_model_len=1024,
            **options,
        )
    )


def _run(
    engine: LLMEngine, prompts: Mapping[int, Tokens], arrivals: random.Random | None = None
) -> list[Tokens]:
    """Outputs by number of the prompt. With ``arrivals``, up to two prompts come before each step."""
    waiting = list(prompts.items())
    outputs: dict[int, Tokens] = {number: [] for number in sorted(prompts)}
    while waiting or engine.has_unfinished:
        num_arriving = arrivals.randrange(3) if arrivals else len(waiting)
        for number, prompt in waiting[:num_arriving]:
            engine.add_request(str(number), prompt, GREEDY)
        del waiting[:num_arriving]
        for output in engine.step():
            assert output.failure is None
            assert output.index == len(outputs[int(output.request_id)])
            outputs[int(output.request_id)].append(output.token_id)
    engine.check_integrity()
    return list(outputs.values())


@torch.inference_mode()
def _refer(model: Any, prompt: Tokens, output: Tokens) -> Reference:
    ids = torch.tensor([prompt + output[:-1]])
    logits = model(ids, logits_to_keep=len(output), use_cache=False).logits[0]
    best = logits.topk(2, dim=-1)
    told = logits.log_softmax(dim=-1).gather(1, torch.tensor(output)[:, None])[:, 0]
    leads = -best.values.diff(dim=-1)[:, 0]
    return Reference(best.indices[:, 0].tolist(), leads.tolist(), told.tolist())


def _check(
    name: str,
    outputs: Sequence[Tokens],
    references: Sequence[Reference],
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_equal = num_ties = 0
    for number, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        assert len(output) == NUM_OUTPUT_TOKENS
        first = _first_difference(output, reference.tokens)
        num_equal += NUM_OUTPUT_TOKENS if first is None else first
        if first is not None:
            assert reference.leads[first] < TOLERANCE, (
                f"{name}: prompt {number}, token {first} is {output[first]}, transformers says "
                f"{reference.tokens[first]} with a lead of {reference.leads[first]:.2e}"
            )
            num_ties += 1
    with capsys.disabled():
        print(f"\n{name}: {num_equal} tokens equal, {num_ties} prompts ended at a tie")  # noqa: T201


def _first_difference(left: Tokens, right: Tokens) -> int | None:
    return next(
        (at for at, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]), None
    )
