"""Log-probabilities of the tokens an engine chooses: the model's own, in any batch the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference.config import EngineConfig
from inference.engine.llm_engine import LLMEngine
from inference.engine.logprobs import log_normalizer, logprob_of, read_logprobs, to_numpy
from inference.engine.request import Request
from inference.protocol import SamplingParams, TokenLogprob

END_OF_TEXT = 257
LOGPROBS = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=4, logprobs=3)

# By request: of each token what was told, and what the row of logits says.
Told = dict[str, list[TokenLogprob | None]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(artifact: Path, **options: Any) -> LLMEngine:
    values: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 200,
        "num_threads": 1,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "long_prefill_tokens": 64,
        "max_model_len": 128,
    }
    return LLMEngine.load(EngineConfig(artifact, **{**values, **options}))


def prompt(length: int) -> list[int]:
    return [(31 * index + length) % 190 for index in range(length)]


def run(engine: LLMEngine, requests: Mapping[str, tuple[list[int], SamplingParams]]) -> Told:
    for name, (token_ids, sampling) in requests.items():
        engine.add_request(name, token_ids, sampling)
    told: Told = {name: [] for name in requests}
    while engine.has_unfinished:
        for output in engine.step():
            told[output.request_id].append(output.logprob)
    return told


def row_of(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def read_one(logits: torch.Tensor, token_id: int | None, num_best: int | None) -> Any:
    request = Request.from_prompt("r", [1], replace(LOGPROBS, logprobs=num_best))
    return read_logprobs(logits, [request], [token_id]).get("r")


def test_a_value_is_the_log_softmax_of_its_logit() -> None:
    logits = torch.randn((1, 5_000), generator=torch.Generator().manual_seed(0)) * 8
    expected = torch.log_softmax(logits.double(), dim=1)[0]
    row = to_numpy(logits[0])
    normalizer = log_normalizer(row)

    told = [logprob_of(row, token_id, normalizer) for token_id in range(5_000)]

    assert np.allclose(told, expected.numpy(), rtol=2e-7, atol=1e-6)
    assert sum(map(np.exp, told)) == pytest.approx(1.0, abs=1e-5)


def test_the_best_come_best_first_and_the_lowest_of_equal_ids() -> None:
    chosen = read_one(row_of(1.0, 3.0, 2.0, 3.0, 0.0), 4, 3)

    assert [token_id for token_id, _ in chosen.best] == [1, 3, 2]
    assert chosen.best[0][1] == chosen.best[1][1] > chosen.best[2][1] > chosen.logprob


def test_what_cannot_be_chosen_is_not_among_the_best() -> None:
    chosen = read_one(row_of(0.0, -torch.inf, 1.0, -torch.inf), 2, 4)

    assert [token_id for token_id, _ in chosen.best] == [2, 0]


def test_who_did_not_ask_or_has_no_token_is_told_nothing() -> None:
    logits = row_of(0.0, 1.0)

    assert read_one(logits, 1, None) is None
    assert read_one(logits, None, 2) is None
    assert read_one(logits, 1, 0).best == ()


@pytest.mark.parametrize("offset", range(5))
def test_a_row_has_the_same_bits_wherever_it_lies(offset: int) -> None:
    row = np.random.default_rng(1).normal(size=1_003).astype(np.float32)
    elsewhere = np.empty(row.size + offset + 7, np.float32)
    elsewhere[offset : offset + row.size] = row

    assert log_normalizer(elsewhere[offset : offset + row.size]) == log_normalizer(row)


def test_every_token_with_a_text_comes_with_its_own_and_the_best(tiny_artifact: Path) -> None:
    told = run(load(tiny_artifact), {"a": (prompt(20), LOGPROBS)})["a"]

    assert len(told) == 12
    spoken = [each for each in told if each is not None]
    assert len(spoken) >= 10
    for each in spoken:
        assert each.logprob < 0
        values = [value for _, value in each.top]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert values[-1] >= each.logprob or (each.token, each.logprob) in each.top


def test_bias_penalties_and_temperature_do_not_change_the_models_own(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact)
    greedy = replace(LOGPROBS, temperature=0.0, max_tokens=1)
    best = run(engine, {"a": (prompt(9), greedy)})["a"][0]
    forced = replace(
        LOGPROBS, logit_bias={65: 100.0}, temperature=0.3, frequency_penalty=1.0, max_tokens=1
    )
    told = run(engine, {"a": (prompt(9), forced)})["a"][0]

    assert best is not None
    assert told is not None
    assert told.top == best.top
    assert told.logprob < best.logprob


def test_a_token_without_a_text_has_none(tiny_artifact: Path) -> None:
    ends = replace(LOGPROBS, ignore_eos=False, logit_bias={END_OF_TEXT: 100.0})

    assert run(load(tiny_artifact), {"a": (prompt(9), ends)})["a"] == [None]


@pytest.mark.parametrize(
    "options",
    [{}, {"long_prefill_tokens": 7}, {"max_num_batched_tokens": 16}, {"num_blocks": 34}],
    ids=["in a batch", "in chunks", "in small steps", "preempted"],
)
@pytest.mark.parametrize("kernel", ["torch", "auto"])
def test_values_do_not_depend_on_the_batch(
    tiny_artifact: Path, options: dict[str, Any], kernel: str
) -> None:
    requests = {
        f"r{index}": (prompt(5 + 5 * index), replace(LOGPROBS, seed=index, max_tokens=24))
        for index in range(8)
    }
    engine = load(tiny_artifact, kernel=kernel)
    alone: Told = {}
    for name, request in requests.items():
        alone |= run(engine, {name: request})

    crowded = load(tiny_artifact, kernel=kernel, **options)
    assert run(crowded, requests) == alone
    assert crowded.num_preemptions > 0 or "num_blocks" not in options


def test_a_reduction_that_sees_its_neighbours_is_noticed(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = {f"r{index}": (prompt(5 + index), LOGPROBS) for index in range(2)}
    engine = load(tiny_artifact)
    alone: Told = {}
    for name, request in requests.items():
        alone |= run(engine, {name: request})

    def read_all(logits: torch.Tensor, *rest: Any) -> Any:
        return read_logprobs(
            logits + 1e-3 * torch.arange(logits[0].numel()) * (len(logits) > 1), *rest
        )

    monkeypatch.setattr("inference.engine.llm_engine.read_logprobs", read_all)
    assert run(engine, requests) != alone


def test_a_part_of_a_character_has_its_bytes_though_it_has_no_text_yet(
    tiny_artifact: Path,
) -> None:
    engine = load(tiny_artifact)
    (first, *_) = engine.encode_answer("🙂")  # the tiny tokenizer has a token for each byte
    engine.add_request("a", prompt(5), replace(LOGPROBS, logit_bias={first: 100.0}, max_tokens=2))
    (output,) = engine.step()

    assert output.text == ""
    assert output.logprob is not None
    assert TokenLogprob.to_bytes(output.logprob.token) == b"\xf0"
