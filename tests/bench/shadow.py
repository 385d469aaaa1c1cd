"""What the cheap shadow costs beside the full one, and whether it sees the same: real weights, no HTTP.

The incumbent (bf16) answers a question. The candidate (int4) scores that answer in one pass, and answers the question itself.
Each is billed the engine seconds that a copy would be; then it is asked how well the score foretells whether the answers differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from scipy.stats import spearmanr

from controlplane.rollouts.pairing import similarity
from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.engine.request import StepOutput
from inference.protocol import ChatMessage, GenerateRequest, SamplingParams, Score
from tests.bench.table import Row, render
from tests.bench.weights import import_weights
from tests.flows.questions import Question, ask_in_turn

NUM_QUESTIONS, NUM_QUICK = 40, 8
NUM_TOKENS = (16, 64)
SHARES = {"en": 2, "de": 1, "es": 1}


@dataclass(frozen=True, slots=True)
class Compared:
    """One question: what either copy cost, and what either saw."""

    score_s: float
    decode_s: float
    disagreement: float
    surprise: float
    differs: bool
    unlikeness: float


def measure(*, is_quick: bool) -> Iterator[str]:
    """Lines of the report, on one thread."""
    num_questions = NUM_QUICK if is_quick else NUM_QUESTIONS
    yield (
        f"\nCheap shadow: {num_questions} questions in three languages, bf16 answers, int4 scores and answers, 1 thread"
    )
    # Without the cache the second of two copies of one prompt would not find it computed, as elsewhere it does not.
    incumbent, candidate = (
        LLMEngine.load(EngineConfig(import_weights(kind), num_threads=1, prefix_cache=0))
        for kind in ("bf16", "int4")
    )
    questions = list(islice(ask_in_turn(SHARES), num_questions))
    for num_tokens in NUM_TOKENS:
        found = [compare(incumbent, candidate, question, num_tokens) for question in questions]
        yield f"\nAnswers of at most {num_tokens} tokens, {sum(each.differs for each in found)} of them differ:"
        yield from render(_rows(found))


def compare(
    incumbent: LLMEngine, candidate: LLMEngine, question: Question, num_tokens: int
) -> Compared:
    """One question, answered, scored, and answered again."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    request = GenerateRequest(
        "bench", "", sampling, 60.0, messages=(ChatMessage("user", question.text),)
    )
    answer, _ = _run(incumbent, request)
    _, cheap = _run(candidate, request, candidate.encode_answer(answer))
    other, full = _run(candidate, request)
    score = cheap.score or Score((), 0)
    num_scored = max(1, len(score.logprobs))
    return Compared(
        score_s=cheap.engine_s,
        decode_s=full.engine_s,
        disagreement=1 - score.num_agreed / num_scored,
        surprise=-sum(score.logprobs) / num_scored,
        differs=answer != other,
        unlikeness=1 - similarity(answer, other),
    )


def _run(
    engine: LLMEngine, request: GenerateRequest, scored: Sequence[int] = ()
) -> tuple[str, StepOutput]:
    """The text, and the last output, which has the bill and the score."""
    tokens = engine.encode(request)
    engine.add_request(request.id, tokens, request.sampling, scored_token_ids=scored)
    outputs: list[StepOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    return "".join(output.text for output in outputs), outputs[-1]


def _rows(found: Sequence[Compared]) -> Iterator[Row]:
    score_s, decode_s = sum(each.score_s for each in found), sum(each.decode_s for each in found)
    yield Row("engine s per copy", "score", [score_s / len(found)], ".3f")
    yield Row("engine s per copy", "full", [decode_s / len(found)], ".3f")
    yield Row("cost", "full / score", [decode_s / score_s], ".2f")
    for name in ("disagreement", "surprise"):
        signal = [getattr(each, name) for each in found]
        seen = [each.unlikeness for each in found]
        result = spearmanr(signal, seen)
        note = f"p = {result.pvalue:.1g}"
        yield Row("rank correlation with unlikeness", name, [float(result.statistic)], ".2f", note)
    right = sum((each.disagreement > 0) == each.differs for each in found)
    yield Row("any disagreement = any difference", "score", [right / len(found)], ".2f")
