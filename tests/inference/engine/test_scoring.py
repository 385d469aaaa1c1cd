"""An answer that is there already is scored as transformers would, in bounded memory, in any batch the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from inference.artifact import WEIGHTS, read_manifest
from inference.config import EngineConfig
from inference.engine import scoring
from inference.engine.llm_engine import LLMEngine
from inference.engine.plan import PlannedRow
from inference.engine.request import RequestRefused, StepOutput
from inference.engine.runner import Runner
from inference.engine.scoring import cut, scoring_request
from inference.protocol import ChatMessage, FinishReason, GenerateRequest, SamplingParams, Score

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
TOLERANCE = 2e-4

# By request: the prompt and the answer.
Asked = Mapping[str, tuple[Sequence[int], Sequence[int]]]


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, *, poisoned_token: int | None = None, **shape: Any) -> Path: ...


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(artifact: Path, **options: Any) -> LLMEngine:
    values: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 300,
        "num_threads": 1,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "long_prefill_tokens": 512,
        "max_model_len": 256,
    }
    return LLMEngine.load(EngineConfig(artifact, **{**values, **options}))


def ids(length: int, salt: int = 0) -> list[int]:
    return [(31 * index + 7 * salt + length) % 190 for index in range(length)]


def run(engine: LLMEngine, asked: Asked) -> dict[str, StepOutput]:
    """The one output of each request."""
    for name, (prompt, answer) in asked.items():
        engine.add_request(name, prompt, GREEDY, scored_token_ids=answer)
    outputs: list[StepOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    engine.check_integrity()
    assert len(outputs) == len(asked)
    return {output.request_id: output for output in outputs}


def scores(engine: LLMEngine, asked: Asked) -> dict[str, Score | None]:
    return {name: output.score for name, output in run(engine, asked).items()}


def reference_score(artifact: Path, prompt: Sequence[int], answer: Sequence[int]) -> Score:
    """By Hugging Face's implementation on the same weights."""
    model = read_manifest(artifact).model
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        tie_word_embeddings=model.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
    )
    reference: Any = LlamaForCausalLM(config)
    reference.eval()
    reference.load_state_dict(load_file(artifact / WEIGHTS), strict=False)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    # Padding of the vocabulary beyond the tokenizer's ids is never part of the distribution.
    told = torch.log_softmax(logits[:, :258].double(), dim=1)
    target = torch.tensor(answer)
    agreed = int((logits[:, :258].argmax(dim=1) == target).sum())
    return Score(tuple(told.gather(1, target[:, None])[:, 0].tolist()), agreed)


# ------------------------------------------------------------------------------------------- the values


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize(("num_prompt", "num_answer"), [(1, 1), (5, 40), (70, 100), (33, 32)])
def test_a_score_is_that_of_transformers(
    tiny_artifact: Path, kernel: str, num_prompt: int, num_answer: int
) -> None:
    prompt, answer = ids(num_prompt), ids(num_answer, salt=3)
    expected = reference_score(tiny_artifact, prompt, answer)
    output = run(load(tiny_artifact, kernel=kernel), {"a": (prompt, answer)})["a"]

    assert output.score is not None
    assert output.score.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
    assert output.score.num_agreed == expected.num_agreed


def test_its_own_greedy_answer_is_agreed_to_in_full(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    (mine,) = engine.generate(["abc"], GREEDY)
    told: list[float] = []
    engine.add_request("a", engine.encode(_request("abc")), _with_logprobs())
    while engine.has_unfinished:
        told += [output.logprob.logprob for output in engine.step() if output.logprob]

    score = scores(engine, {"b": (engine.encode(_request("abc")), mine.token_ids)})["b"]

    assert score is not None
    assert score.num_agreed == len(mine.token_ids)
    assert set(told) <= set(score.logprobs), "An answer has other values than when it was given."


def _request(prompt: str) -> GenerateRequest:
    return GenerateRequest("r", "chat", GREEDY, 30.0, prompt=prompt)


def _with_logprobs() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)


def test_the_output_counts_the_prompt_and_the_answer_apart(tiny_artifact: Path) -> None:
    output = run(load(tiny_artifact), {"a": (ids(11), ids(23))})["a"]

    assert (output.num_prompt_tokens, output.num_output_tokens) == (11, 23)
    assert (output.index, output.text, output.finish_reason) == (0, "", FinishReason.STOP)
    assert output.failure is None
    assert output.started_at > 0


# ------------------------------------------------------------------------------------------- invariance

ASKED: Asked = {f"r{n}": (ids(4 + 9 * n), ids(1 + 17 * n, salt=n)) for n in range(6)}


@pytest.fixture(scope="module", params=["torch", "auto"])
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(tiny_artifact: Path, kernel: str) -> dict[str, Score | None]:
    """Each with the engine to itself."""
    torch.set_num_threads(1)
    engine = load(tiny_artifact, kernel=kernel)
    told: dict[str, Score | None] = {}
    for name, asked in ASKED.items():
        told |= scores(engine, {name: asked})
    return told


@pytest.mark.parametrize(
    "options",
    [{}, {"long_prefill_tokens": 7}, {"long_prefill_tokens": 64}, {"max_num_batched_tokens": 48}],
    ids=["in a batch", "in chunks of 7", "in chunks of 64", "in small steps"],
)
def test_a_score_does_not_depend_on_the_batch(
    tiny_artifact: Path, kernel: str, alone: Mapping[str, Score | None], options: dict[str, Any]
) -> None:
    engine = load(tiny_artifact, kernel=kernel, **options)
    engine.add_request("mate", ids(30), GREEDY)
    outputs = _finish(engine, ASKED)

    assert outputs == alone


def _finish(engine: LLMEngine, asked: Asked) -> dict[str, Score | None]:
    for name, (prompt, answer) in asked.items():
        engine.add_request(name, prompt, GREEDY, scored_token_ids=answer)
    told: dict[str, Score | None] = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.request_id in asked:
                assert output.request_id not in told
                told[output.request_id] = output.score
    return told


def test_cached_blocks_and_batch_mates_that_ask_change_no_answer(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    (before,) = engine.generate(["abcdefgh"], GREEDY)
    prompt = engine.encode(_request("abcdefgh"))
    first = scores(engine, {"a": (prompt, before.token_ids)})

    again = scores(engine, {"a": (prompt, before.token_ids)})
    (after,) = engine.generate(["abcdefgh"], GREEDY)

    assert again == first
    assert after.token_ids == before.token_ids


def test_a_score_survives_a_preemption(tiny_artifact: Path) -> None:
    asked = {"young": (ids(20), ids(80, salt=1))}
    expected = scores(load(tiny_artifact, max_model_len=128), asked)
    engine = load(tiny_artifact, num_blocks=34, max_model_len=128, long_prefill_tokens=2)
    engine.add_request(
        "old", ids(10), SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    )
    engine.step()

    assert _finish(engine, asked) == expected
    assert engine.num_preemptions > 0


# ------------------------------------------------------------------------------------------- bounds, failures


def test_only_a_few_rows_of_logits_are_there_at_once(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, sizes = Runner.compute, []

    def watch(self: Runner, *arguments: Any) -> Tensor:
        logits = compute(self, *arguments)
        sizes.append(len(logits))
        return logits

    monkeypatch.setattr(Runner, "compute", watch)
    engine = load(tiny_artifact)
    scores(engine, {f"r{n}": (ids(5), ids(100, salt=n)) for n in range(3)})

    assert sum(sizes) == 300
    assert max(sizes) == scoring.MAX_ROWS


def test_what_does_not_fit_the_context_is_refused(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact, max_model_len=64)
    with pytest.raises(RequestRefused, match="context"):
        engine.add_request("a", ids(30), GREEDY, scored_token_ids=ids(35))
    assert not engine.has_unfinished

    assert run(engine, {"a": (ids(30), ids(34))})["a"].score is not None


def test_one_that_was_aborted_leaves_nothing(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact, long_prefill_tokens=8)
    engine.add_request("a", ids(30), GREEDY, scored_token_ids=ids(30))
    engine.step()

    assert engine.abort("a")
    assert not engine.has_unfinished
    engine.check_integrity()
    engine.add_request("a", ids(5), GREEDY)
    (output,) = engine.step()
    assert (output.failure, output.score) == (None, None)


def test_logits_that_are_no_numbers_fail_one_request_alone(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    engine = load(write_tiny_artifact(poisoned_token=200, tie_word_embeddings=False))
    outputs = run(engine, {"bad": (ids(9), [3, 200, 4, 5]), "good": (ids(9), [3, 4, 5])})

    assert outputs["bad"].failure is not None
    assert outputs["bad"].score is None
    assert outputs["good"].score is not None


# ------------------------------------------------------------------------------------------- cutting into steps

rows = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 30), st.integers(1, 60)),
    min_size=1,
    max_size=5,
)


@given(shapes=rows, most=st.integers(1, 16))
def test_steps_hold_every_token_once_in_order_and_few_logits(
    shapes: list[tuple[int, int, int, int]], most: int
) -> None:
    planned = []
    for index, (num_prompt, num_answer, start, num_tokens) in enumerate(shapes):
        request = scoring_request(f"r{index}", ids(num_prompt), ids(num_answer))
        start = min(start, len(request.tokens) - 1)
        num_tokens = min(num_tokens, len(request.tokens) - start)
        planned.append(PlannedRow(request, start, num_tokens, samples=True))

    steps = cut(planned, most)

    covered: dict[str, list[int]] = {row.request.id: [] for row in planned}
    for step in steps:
        assert len({piece.request.id for piece in step}) == len(step) > 0
        positions = [
            (piece.request, position)
            for piece in step
            for position in range(piece.start, piece.start + piece.num_tokens)
        ]
        assert sum(position >= (each.first_logit or 0) for each, position in positions) <= most
        for each, position in positions:
            covered[each.id].append(position)
    for row in planned:
        assert covered[row.request.id] == list(range(row.start, row.start + row.num_tokens))


# ------------------------------------------------------------------------------------------- the text's tokens


def test_an_answer_is_encoded_without_tokens_of_its_own(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    chat = GenerateRequest("r", "chat", GREEDY, 30.0, messages=(ChatMessage("user", "hi"),))

    answer = engine.encode_answer("hello")

    assert len(answer) == 5
    assert engine.encode(chat)[-len(answer) :] != answer
    assert engine.encode_answer("") == ()


def test_a_control_token_that_an_answer_spells_is_text(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    control = engine.encode_answer("<|im_end|>")

    assert 257 not in control
    assert len(control) == len("<|im_end|>")


def test_half_a_surrogate_pair_is_refused(tiny_artifact: Path) -> None:
    with pytest.raises(RequestRefused, match="surrogate"):
        load(tiny_artifact).encode_answer("\ud800")
