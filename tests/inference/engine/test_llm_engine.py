"""The engine as its callers see it: requests in, outputs of steps out, failures that stay where they are."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from inference.config import EngineConfig, InvalidConfig
from inference.engine import llm_engine
from inference.engine.detokenizer import Detokenizer
from inference.engine.llm_engine import LLMEngine, WarmUpFailed
from inference.engine.plan import StepPlan
from inference.engine.request import Request, RequestRefused, StepOutput
from inference.engine.runner import Runner
from inference.engine.sampler import sample
from inference.protocol import ChatMessage, FinishReason, SamplingParams

END_OF_TEXT = 257
POISON = 200
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
# A random model soon repeats its best token, whatever it has read; drawn tokens tell more about the logits.
SEEDED = replace(GREEDY, temperature=1.0, seed=11)


class WriteTinyArtifact(Protocol):
    """As in the fixture of this name."""

    def __call__(self, *, poisoned_token: int | None = None, **shape: Any) -> Path: ...


def _load(artifact: Path, **options: Any) -> LLMEngine:
    values: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 60,
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "long_prefill_tokens": 16,
        "max_model_len": 128,
    }
    return LLMEngine.load(EngineConfig(artifact, **{**values, **options}))


@pytest.fixture
def engine(tiny_artifact: Path) -> LLMEngine:
    return _load(tiny_artifact)


def _prompt(length: int) -> list[int]:
    return [(31 * index + length) % 190 for index in range(length)]


def _run(engine: LLMEngine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine.check_integrity()
    return outputs


def _tokens(outputs: Sequence[StepOutput]) -> list[int]:
    return [output.token_id for output in outputs]


def test_outputs_are_numbered_and_the_last_one_ends_the_request(engine: LLMEngine) -> None:
    engine.add_request("a", _prompt(20), SEEDED)
    outputs = _run(engine)["a"]
    assert [output.index for output in outputs] == list(range(12))
    assert [output.num_output_tokens for output in outputs] == list(range(1, 13))
    assert {output.num_prompt_tokens for output in outputs} == {20}
    assert len({output.started_at for output in outputs}) == 1
    assert [output.finish_reason for output in outputs] == [None] * 11 + [FinishReason.LENGTH]
    assert engine.step() == []


def test_texts_put_together_are_the_text_of_all_tokens(engine: LLMEngine) -> None:
    sampling = replace(GREEDY, logit_bias={65: 100.0}, max_tokens=3)  # every answer is one letter
    [completion] = engine.generate(["abc"], sampling)
    assert completion.text == engine.generate(["abc"], sampling)[0].text
    assert completion.token_ids == (65, 65, 65)
    assert len(completion.text) == 3
    assert len(set(completion.text)) == 1
    assert completion.finish_reason is FinishReason.LENGTH


def test_answers_come_in_the_order_of_the_prompts(engine: LLMEngine) -> None:
    chat = [ChatMessage("user", "hello")]
    together = engine.generate(["one", chat, "three and more"], SEEDED)
    apart = [engine.generate([prompt], SEEDED)[0] for prompt in ("one", chat, "three and more")]
    assert together == apart
    assert len({completion.token_ids for completion in together}) == 3
    assert together[0].num_prompt_tokens == 3
    assert together[2].num_prompt_tokens == 14


def test_an_end_of_text_token_ends_the_answer_without_text(engine: LLMEngine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={END_OF_TEXT: 100.0})
    [completion] = engine.generate(["abc"], sampling)
    assert completion.token_ids == (END_OF_TEXT,)
    assert completion.text == ""
    assert completion.finish_reason is FinishReason.STOP


def test_a_stop_string_ends_the_answer_and_frees_the_blocks(engine: LLMEngine) -> None:
    biased = replace(GREEDY, logit_bias={65: 100.0})
    letter = engine.generate(["abc"], biased)[0].text[0]
    [completion] = engine.generate(["abc"], replace(biased, stop=(letter * 3,)))
    assert completion.token_ids == (65, 65, 65)
    assert completion.text == ""
    assert completion.finish_reason is FinishReason.STOP
    assert not engine.has_unfinished
    engine.check_integrity()


def test_a_stop_string_in_the_last_token_counts_as_a_stop(engine: LLMEngine) -> None:
    biased = replace(GREEDY, logit_bias={65: 100.0}, max_tokens=3)
    letter = engine.generate(["abc"], biased)[0].text[0]
    [completion] = engine.generate(["abc"], replace(biased, stop=(letter * 3,)))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.text == ""


def test_text_that_only_began_like_a_stop_string_is_delivered_at_the_end(engine: LLMEngine) -> None:
    biased = replace(GREEDY, logit_bias={65: 100.0}, max_tokens=3)
    text = engine.generate(["abc"], biased)[0].text
    [completion] = engine.generate(["abc"], replace(biased, stop=(text[0] * 4,)))
    assert completion.text == text
    assert completion.finish_reason is FinishReason.LENGTH


def test_preemption_changes_no_token(tiny_artifact: Path) -> None:
    roomy, tight = _load(tiny_artifact), _load(tiny_artifact, num_blocks=16)
    for engine in (roomy, tight):
        for length in (5, 17, 9, 21):
            engine.add_request(str(length), _prompt(length), replace(SEEDED, max_tokens=30))
    expected, outputs = _run(roomy), _run(tight)
    assert tight.num_preemptions > 0
    assert roomy.num_preemptions == 0
    for name, each in expected.items():
        assert _tokens(outputs[name]) == _tokens(each)
        assert [output.index for output in outputs[name]] == list(range(30))


def _waiting(engine: LLMEngine) -> None:
    assert engine.has_unfinished


def _in_mid_prefill(engine: LLMEngine) -> None:
    assert engine.step() == []


def _decoding(engine: LLMEngine) -> None:
    while not engine.step():
        pass


def _preempted(engine: LLMEngine) -> None:
    for number in range(4):
        engine.abort("victim")
        engine.add_request(f"older {number}", _prompt(20 + number), replace(SEEDED, max_tokens=80))
    engine.add_request("victim", _prompt(40), SEEDED)
    while engine.num_preemptions == 0:
        engine.step()


@pytest.mark.parametrize("reach", [_waiting, _in_mid_prefill, _decoding, _preempted])
def test_abort_frees_everything_in_every_state(
    tiny_artifact: Path, reach: Callable[[LLMEngine], None]
) -> None:
    engine = _load(tiny_artifact, num_blocks=40)
    engine.add_request("victim", _prompt(40), SEEDED)
    reach(engine)

    assert engine.abort("victim")
    assert not engine.abort("victim")
    engine.check_integrity()

    others = [f"older {number}" for number in range(4) if engine.abort(f"older {number}")]
    assert len(others) == (4 if reach is _preempted else 0)
    assert not engine.has_unfinished
    assert engine.room() == 8
    assert engine.step() == []
    engine.check_integrity()


def test_a_request_whose_numbers_are_broken_fails_alone(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    artifact = write_tiny_artifact(poisoned_token=POISON, tie_word_embeddings=False)
    engine = _load(artifact)
    engine.add_request("healthy", _prompt(30), SEEDED)
    expected = _tokens(_run(engine)["healthy"])

    engine.add_request("healthy", _prompt(30), SEEDED)
    engine.add_request("broken", [1, POISON, 3], SEEDED)
    outputs = _run(engine)

    assert _tokens(outputs["healthy"]) == expected
    [failed] = outputs["broken"]
    assert failed.failure is not None
    assert failed.failure.status == 500
    assert (failed.index, failed.num_output_tokens, failed.finish_reason) == (0, 0, None)


def test_blocks_of_a_broken_request_do_no_harm_to_the_next_owner(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    artifact = write_tiny_artifact(poisoned_token=POISON, tie_word_embeddings=False)
    fresh, used = _load(artifact), _load(artifact)
    used.add_request("broken", [POISON] * 60, SEEDED)
    _run(used)
    for engine in (fresh, used):
        engine.add_request("next", _prompt(30), SEEDED)
    assert _tokens(_run(used)["next"]) == _tokens(_run(fresh)["next"])


def test_a_text_that_cannot_be_made_fails_its_request_alone(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push = Detokenizer.push

    def refuse_one(self: Detokenizer, token_id: int) -> tuple[str, bool]:
        if self is engine._streams["broken"].detokenizer:
            raise ValueError("no such piece")
        return push(self, token_id)

    for name in ("healthy", "broken"):
        engine.add_request(name, _prompt(9), SEEDED)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(Detokenizer, "push", refuse_one)
        first = {output.request_id: output for output in engine.step()}
    assert first["broken"].failure is not None
    assert (first["broken"].index, first["broken"].num_output_tokens) == (0, 0)
    assert first["healthy"].failure is None
    assert "text failed request=broken" in caplog.text
    assert len(_run(engine)["healthy"]) == 11


def test_a_sampler_that_cannot_serve_one_request_serves_the_others(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_one(logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
        if any(request.id == "broken" for request in requests):
            raise OverflowError("the seed")
        return sample(logits, requests)

    for name in ("healthy", "broken"):
        engine.add_request(name, _prompt(9), SEEDED)
    monkeypatch.setattr(llm_engine, "sample", refuse_one)
    outputs = _run(engine)
    assert [output.failure is None for output in outputs["broken"]] == [False]
    assert len(outputs["healthy"]) == 12


def test_a_step_that_raised_can_be_made_again(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request("a", _prompt(9), SEEDED)
    expected = _tokens(_run(engine)["a"])

    def fail(self: Runner, plan: StepPlan) -> Tensor:
        raise MemoryError

    engine.add_request("a", _prompt(9), SEEDED)
    tokens = _tokens(engine.step())
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", fail)
        with pytest.raises(MemoryError):
            engine.step()
    assert tokens + _tokens(_run(engine)["a"]) == expected


def test_an_id_beyond_the_tokenizer_is_never_chosen(engine: LLMEngine) -> None:
    [completion] = engine.generate(["abc"], replace(GREEDY, logit_bias={300: 100.0}))
    assert completion.failure is None
    assert 300 not in completion.token_ids


def test_what_can_never_run_is_refused_and_leaves_nothing(engine: LLMEngine) -> None:
    for prompt, code in ((_prompt(128), "context_length_exceeded"), ([5, 320], "invalid_request")):
        with pytest.raises(RequestRefused) as refusal:
            engine.add_request("a", prompt, SEEDED)
        assert refusal.value.failure.code == code
        assert refusal.value.failure.status == 400
    assert not engine.has_unfinished
    assert engine.room() == 8


def test_room_falls_with_every_request_and_never_below_nothing(engine: LLMEngine) -> None:
    for number in range(9):
        assert engine.room() == max(8 - number, 0)
        engine.add_request(str(number), _prompt(5), SEEDED)
    assert engine.room() == 0
    _run(engine)
    assert engine.room() == 8


def test_a_request_of_the_same_id_is_not_taken_twice(engine: LLMEngine) -> None:
    engine.add_request("a", _prompt(5), SEEDED)
    with pytest.raises(ValueError, match="already here"):
        engine.add_request("a", _prompt(6), SEEDED)
    assert len(_run(engine)["a"]) == 12


def test_warming_up_leaves_an_idle_engine(engine: LLMEngine) -> None:
    engine.warm_up()
    assert not engine.has_unfinished
    engine.check_integrity()


def test_the_smallest_pool_can_be_warmed_up(tiny_artifact: Path) -> None:
    _load(tiny_artifact, num_blocks=2, block_size=2).warm_up()


def test_a_model_that_computes_no_numbers_is_not_warm(
    write_tiny_artifact: WriteTinyArtifact,
) -> None:
    engine = _load(write_tiny_artifact(poisoned_token=0, tie_word_embeddings=False))
    with pytest.raises(WarmUpFailed):
        engine.warm_up()
    assert not engine.has_unfinished


def test_equal_fingerprints_mean_equal_numerics(
    tiny_artifact: Path, write_tiny_artifact: WriteTinyArtifact
) -> None:
    fingerprint = _load(tiny_artifact).fingerprint
    assert _load(tiny_artifact, num_blocks=30, long_prefill_tokens=3).fingerprint == fingerprint
    others = [
        _load(tiny_artifact, dtype="bfloat16"),
        _load(tiny_artifact, kernel="torch"),
        _load(tiny_artifact, kernel="torch", num_threads=2),
        _load(write_tiny_artifact(rope_theta=500.0)),
    ]
    assert len({fingerprint, *(other.fingerprint for other in others)}) == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_gives_the_same_tokens_alone_and_in_a_batch(
    tiny_artifact: Path, dtype: str
) -> None:
    engine = _load(tiny_artifact, dtype=dtype)
    alone = {}
    for length in (3, 20, 33):
        engine.add_request("a", _prompt(length), SEEDED)
        alone[str(length)] = _tokens(_run(engine)["a"])
    for length in (3, 20, 33):
        engine.add_request(str(length), _prompt(length), SEEDED)
    assert {name: _tokens(outputs) for name, outputs in _run(engine).items()} == alone


def test_threads_are_left_for_others_unless_the_settings_say_otherwise(tiny_artifact: Path) -> None:
    _load(tiny_artifact, num_threads=2)
    assert torch.get_num_threads() == 2
    _load(tiny_artifact, num_threads=0)
    assert torch.get_num_threads() == max(len(os.sched_getaffinity(0)) - 1, 1)


def test_a_context_longer_than_the_model_is_refused(tiny_artifact: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"max_model_len=513 .* context of 512"):
        _load(tiny_artifact, max_model_len=513)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_is_named(tiny_artifact: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"device='cuda' needs a CUDA device"):
        _load(tiny_artifact, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_tokens_of_the_cpu(tiny_artifact: Path) -> None:
    engines = [_load(tiny_artifact, device=device) for device in ("cpu", "cuda")]
    outputs = [engine.generate(["one", "another one"], GREEDY) for engine in engines]
    assert outputs[0] == outputs[1]
