"""Choosing tokens: known values, the right distribution, and nothing but the request's own seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.engine.request import Request
from inference.engine.sampler import sample
from inference.protocol import SamplingParams

VOCAB = 50

# What chi-square by its degrees of freedom exceeds in one case of 1000 (NIST/SEMATECH e-Handbook, 1.3.6.7.4).
CHI_SQUARE_999 = {
    1: 10.828, 2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515, 6: 22.458, 7: 24.322, 15: 37.697,
}  # fmt: skip


def make_request(
    *,
    id: str = "request",
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    **params: Any,
) -> Request:
    request = Request.from_prompt(id, prompt, SamplingParams(**params))
    request.tokens.extend(output)
    return request


def choose(logits: list[float], **params: Any) -> int | None:
    (token_id,) = sample(torch.tensor([logits]), [make_request(**params)])
    return token_id


def draw(logits: list[float], num_draws: int, **params: Any) -> Counter[int]:
    """How often each token is drawn over ``num_draws`` seeds."""
    row = torch.tensor(logits).expand(num_draws, -1)
    tokens = sample(row, [make_request(seed=seed, **params) for seed in range(num_draws)])
    return Counter(token_id for token_id in tokens if token_id is not None)


def fits(counts: Mapping[Any, int], expected: Mapping[Any, float]) -> bool:
    """Whether the counts are as near to what is expected as in 999 of 1000 cases."""
    distance = sum((counts[cell] - mean) ** 2 / mean for cell, mean in expected.items())
    return distance < CHI_SQUARE_999[len(expected) - 1]


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_temperature_zero_takes_the_best_and_the_lowest_of_equals() -> None:
    assert choose([0.0, 2.0, 1.0, 2.0], temperature=0.0) == 1


def test_top_k_one_takes_the_best_whatever_the_temperature() -> None:
    assert draw([0.0, 2.0, 1.0, 2.0], 50, top_k=1, temperature=2.0) == {1: 50}


def test_a_tiny_top_p_takes_the_best() -> None:
    assert draw([0.0, 1.0, 0.9, 1.0], 50, top_p=1e-9) == {1: 50}


def test_a_tiny_temperature_takes_the_best() -> None:
    assert draw([0.0, 1.0, 0.9], 50, temperature=1e-300) == {1: 50}


def test_top_k_leaves_the_best_and_breaks_ties_by_id() -> None:
    assert draw([1.0, 3.0, 2.0, 2.0, 2.0], 300, top_k=3).keys() == {1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.49, {0}), (0.51, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2}), (0.96, {0, 1, 2, 3})],
)
def test_top_p_leaves_the_smallest_set_that_holds_it(top_p: float, expected: set[int]) -> None:
    logits = [math.log(share) for share in (0.5, 0.3, 0.15, 0.05)]
    assert draw(logits, 400, top_p=top_p).keys() == expected


def test_top_p_counts_what_top_k_left() -> None:
    # Of the two best, 0.625 and 0.375, the first alone holds 0.6; of all four it would not.
    logits = [math.log(share) for share in (0.5, 0.3, 0.15, 0.05)]
    assert draw(logits, 200, top_k=2, top_p=0.6) == {0: 200}
    assert draw(logits, 200, top_p=0.6).keys() == {0, 1}


def test_min_p_leaves_what_has_a_share_of_the_best() -> None:
    logits = [math.log(share) for share in (0.5, 0.3, 0.15, 0.05)]
    assert draw(logits, 400, min_p=0.29).keys() == {0, 1, 2}
    assert draw(logits, 400, min_p=0.31).keys() == {0, 1}
    assert draw(logits, 100, min_p=1.0) == {0: 100}


def test_a_nucleus_wider_than_the_first_shortlist_is_found() -> None:
    counts = draw([0.0] * 1000, 400, top_p=0.5)
    assert max(counts) < 500
    assert len(counts) > 200


def test_penalties_have_their_documented_values() -> None:
    # Greedy between the token under test and one with a known logit on either side of the expected value.
    def is_above(value: float, logit: float, **params: Any) -> bool:
        return choose([logit, value], temperature=0.0, **params) == 0

    history: dict[str, Any] = {"prompt": (0, 0, 0), "output": (0, 0)}
    cases: list[tuple[float, dict[str, float], float]] = [
        (4.0, {"repetition_penalty": 2.0}, 2.0),
        (-4.0, {"repetition_penalty": 2.0}, -8.0),
        (4.0, {"presence_penalty": 1.5}, 2.5),
        (4.0, {"frequency_penalty": 1.5}, 1.0),
        (4.0, {"presence_penalty": -0.5, "frequency_penalty": 0.25}, 4.0),
        (4.0, {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.25}, 0.5),
    ]
    for logit, params, expected in cases:
        assert is_above(expected - 0.01, logit, **history, **params)
        assert not is_above(expected + 0.01, logit, **history, **params)


def test_presence_and_frequency_do_not_count_the_prompt() -> None:
    params: dict[str, Any] = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 0.0}
    assert choose([1.0, 0.5], prompt=(0, 0), **params) == 0
    assert choose([1.0, 0.5], prompt=(0, 0), output=(0,), **params) == 1


def test_repetition_counts_the_prompt() -> None:
    assert choose([1.0, 0.9], prompt=(0,), repetition_penalty=1.2, temperature=0.0) == 1


def test_a_bias_lifts_and_buries_tokens() -> None:
    assert choose([1.0, 0.0, 0.0], logit_bias={2: 1.5}, temperature=0.0) == 2
    assert choose([1.0, 0.0, -1.0], logit_bias={0: -100.0}, temperature=0.0) == 1


def test_a_bias_comes_before_penalties() -> None:
    # (1 + 3) / 2 = 2; the other way round it would be 1 / 2 + 3 = 3.5.
    params: dict[str, Any] = {"logit_bias": {0: 3.0}, "repetition_penalty": 2.0, "temperature": 0.0}
    assert choose([1.0, 3.0], prompt=(0,), **params) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.0},
        {"temperature": 0.1},
        {"top_p": 0.05},
        {"top_k": 2},
        {"min_p": 0.9},
        {"seed": 8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 10.0},
        {"logit_bias": {7: 100.0}},
    ],
    ids=str,
)
def test_every_parameter_changes_what_is_drawn(changed: dict[str, Any]) -> None:
    def tokens(**params: Any) -> list[int | None]:
        requests = [
            make_request(output=tuple(range(step)), **{"seed": 7, "temperature": 1.5, **params})
            for step in range(40)
        ]
        return sample(random_logits(40), requests)

    assert tokens(**changed) != tokens()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 2.0, "top_k": 6},
    ],
    ids=str,
)
def test_tokens_have_the_distribution_that_was_asked_for(params: dict[str, Any]) -> None:
    logits = [1.0, -1.0, 0.5, 0.5, 2.0, -4.0, 0.0, 1.5]
    expected = softmax_after_cuts(logits, **params)
    num_draws = 6000
    counts = draw(logits, num_draws, **params)
    kept = [token_id for token_id, share in enumerate(expected) if share > 0]
    assert counts.keys() <= set(kept)
    # With these fixed seeds; a right sampler passes a fresh set of seeds in 999 of 1000 cases.
    assert fits({i: counts[i] for i in kept}, {i: expected[i] * num_draws for i in kept})


def softmax_after_cuts(
    logits: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """The definition, token by token; one cut at a time."""
    weights = {i: math.exp(logit / temperature) for i, logit in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    order = order[: top_k or len(order)]
    total = sum(weights[i] for i in order)
    kept: list[int] = []
    for i in order:
        if sum(weights[j] for j in kept) >= top_p * total:
            break
        if weights[i] >= min_p * weights[order[0]]:
            kept.append(i)
    return [
        weights[i] / sum(weights[j] for j in kept) if i in kept else 0.0 for i in range(len(logits))
    ]


def test_draws_of_one_request_are_independent() -> None:
    # Pairs of successive tokens over 4 equal candidates: 16 equal cells.
    requests = [make_request(seed=5, output=(0,) * step) for step in range(4000)]
    tokens = sample(torch.zeros(4000, 4), requests)
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    cells = [(first, second) for first in range(4) for second in range(4)]
    assert fits({cell: pairs[cell] for cell in cells}, dict.fromkeys(cells, 2000 / 16))


PARAMS: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": -1, "top_p": 0.9},
    {"temperature": 0.0},
    {"seed": 2**63 - 1, "top_k": 5},
    {"seed": -(2**63), "min_p": 0.05, "repetition_penalty": 1.3},
    {},
    {"temperature": 0.0, "frequency_penalty": 0.5},
]


@given(st.permutations(range(len(PARAMS))), st.integers(1, len(PARAMS)), st.integers(0, 20))
@settings(max_examples=60)
def test_a_request_draws_the_same_whatever_shares_its_batch(
    order: list[int], size: int, step: int
) -> None:
    logits = random_logits(len(PARAMS))
    requests = [
        make_request(id=f"request-{index}", output=(3,) * step, **params)
        for index, params in enumerate(PARAMS)
    ]
    alone = [sample(logits[i : i + 1], requests[i : i + 1])[0] for i in range(len(PARAMS))]
    rows = order[:size]
    assert sample(logits[rows], [requests[i] for i in rows]) == [alone[i] for i in rows]


@pytest.mark.parametrize("params", [{"seed": 3}, {}], ids=["seeded", "unseeded"])
def test_a_request_that_is_run_again_draws_the_same(params: dict[str, Any]) -> None:
    logits = random_logits(1)
    runs = {
        tuple(
            sample(logits, [make_request(id="a", output=(0,) * n, **params)])[0] for n in range(20)
        )
        for _ in range(2)
    }
    assert len(runs) == 1


def test_different_seeds_and_different_requests_differ() -> None:
    logits = torch.zeros(1, 1000)
    seeds = [0, 1, -1, 2**32, 2**63 - 1, -(2**63)]
    seeded = {sample(logits, [make_request(seed=seed)])[0] for seed in seeds}
    unseeded = {sample(logits, [make_request(id=f"request-{i}")])[0] for i in range(6)}
    assert len(seeded) == len(unseeded) == 6


def test_the_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    logits = random_logits(1)
    wider = torch.cat([logits, torch.full((1, 31), -math.inf)], dim=1)
    for seed in range(30):
        request = make_request(seed=seed)
        assert sample(logits, [request]) == sample(wider, [request])


def philox_4x64_10(counter: list[int], key: list[int]) -> list[int]:
    """One block by the definition of Salmon et al. (2011), in Python's own integers."""
    mask = 2**64 - 1
    for _ in range(10):
        first, second = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [
            (second >> 64) ^ counter[1] ^ key[0],
            second & mask,
            (first >> 64) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


@pytest.mark.parametrize("seed", [0, 42, -7])
def test_the_noise_is_philox_by_seed_output_token_and_id(seed: int) -> None:
    # A stream that is continued on another slot relies on these tokens, so that they may never change.
    for step in range(20):
        words = philox_4x64_10([1, 0, step, 0], [seed % 2**64, 0])
        bits = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
        request = make_request(seed=seed, output=(0,) * step)
        assert sample(torch.zeros(1, 8), [request]) == [bits.index(min(bits))]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"seed": 1}, {"presence_penalty": 1.0}], ids=str
)
def test_a_row_that_cannot_be_trusted_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    requests = [make_request(id=f"request-{i}", **params) for i in range(3)]
    expected = sample(logits, requests)
    logits[1, 17] = bad
    assert sample(logits, requests) == [expected[0], None, expected[2]]


def test_a_row_without_anything_finite_fails() -> None:
    assert choose([-math.inf, -math.inf]) is None


def test_a_logit_of_minus_infinity_is_never_drawn() -> None:
    assert draw([-math.inf, 0.0, -math.inf], 100, temperature=2.0) == {1: 100}


def test_the_largest_logits_and_the_strongest_penalties_overflow_nothing() -> None:
    huge = [3e38, -3e38, 1.0]
    params: dict[str, Any] = {"prompt": (0, 1), "output": (0, 1), "logit_bias": {0: 100.0}}
    assert choose(huge, repetition_penalty=1e-9, temperature=0.01, **params) == 0
    assert choose(huge, repetition_penalty=10.0, temperature=0.01, **params) == 0


def test_the_logits_are_left_as_they_were() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, [make_request(logit_bias={1: 5.0}, presence_penalty=1.0, output=(4,))] * 2)
    assert torch.equal(logits, before)


def test_tokens_beyond_the_logits_are_ignored() -> None:
    params: dict[str, Any] = {
        "logit_bias": {99: 5.0},
        "repetition_penalty": 2.0,
        "temperature": 0.0,
    }
    assert choose([1.0, 3.0], prompt=(1, 77), **params) == 1


@given(st.integers(1, 400), st.integers(0, 2**32))
@settings(max_examples=50)
def test_the_best_tokens_are_those_of_a_whole_sort(top_k: int, seed: int) -> None:
    row = np.random.default_rng(seed).integers(0, 20, 300).astype(np.float32)
    allowed = set(np.argsort(-row, kind="stable")[:top_k].tolist())
    drawn = sample(torch.from_numpy(row)[None].repeat(8, 1), [
        make_request(seed=i, top_k=top_k, temperature=2.0) for i in range(8)
    ])  # fmt: skip
    assert set(drawn) <= allowed


def test_an_empty_batch_is_fine() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
