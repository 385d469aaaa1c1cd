"""Logits to tokens: what each request asked for, whatever shares its batch.

A token is a function of its row of logits, the request's own tokens and parameters, and noise that depends on the
request's seed, the number of the output token, and the id of the candidate, on nothing else. No state is kept between
steps, so that a request which was preempted, moved, or run again draws the same tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inference.engine.request import Request
from inference.protocol import SamplingParams

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_LARGEST = float(np.finfo(np.float32).max)
_LOWEST_TEMPERATURE = 1e-6
_64_BITS = 2**64 - 1
# How many of the best tokens are sorted in the search for a nucleus, before more are.
_FIRST_SHORTLIST = 64
_SHORTLIST_GROWTH = 8


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int | None]:
    """The next token of each request; None where the row cannot be trusted.

    ``logits`` is [num_rows, vocab] float32, row ``i`` for ``requests[i]``, and is not changed. A logit of minus
    infinity is never chosen. A row that holds a NaN or plus infinity, or nothing finite, gives None and
    touches no other row. Of equal logits the lowest id wins.
    """
    # An argmax stops at the first NaN, so that the value it points to tells whether the whole row is sound.
    rows: Row = logits.detach().to("cpu", torch.float32).numpy()
    best = rows.argmax(axis=1)
    is_sound = np.isfinite(np.take_along_axis(rows, best[:, None], axis=1)[:, 0])
    return [
        None
        if not sound
        else int(token_id)
        if _is_plain(request.sampling)
        else _choose(row, request)
        for row, request, token_id, sound in zip(rows, requests, best, is_sound, strict=True)
    ]


def _is_plain(params: SamplingParams) -> bool:
    return _is_greedy(params) and not _changes_logits(params)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0 or params.top_k == 1


def _changes_logits(params: SamplingParams) -> bool:
    return (
        bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _choose(row: Row, request: Request) -> int:
    params = request.sampling
    if _changes_logits(params):
        row = _adjust(row, request)
    if _is_greedy(params):
        return int(row.argmax())
    # The best token is at 0, so that not even the smallest temperature makes it infinite.
    with np.errstate(over="ignore"):
        scaled = (row - row.max()) / np.float32(max(params.temperature, _LOWEST_TEMPERATURE))
    candidates = _candidates(scaled, params)
    bits = _random_bits(request, len(row))
    if candidates is None:
        return int((scaled + _gumbel(bits)).argmax())
    return int(candidates[(scaled[candidates] + _gumbel(bits[candidates])).argmax()])


def _adjust(row: Row, request: Request) -> Row:
    """``row`` with the bias and the penalties of ``request``, which are rebuilt from its tokens.

    Repetition divides positive and multiplies negative logits of all tokens seen (Keskar et al. 2019,
    arXiv:1909.05858, section 4.1, in the form of Hugging Face); presence and frequency are OpenAI's, on output alone.
    """
    params = request.sampling
    row = row.copy()
    if params.logit_bias:
        ids, biases = _columns(params.logit_bias, len(row))
        row[ids] += biases
    if params.repetition_penalty != 1.0:
        ids, _ = _columns(dict.fromkeys(request.tokens, 0.0), len(row))
        seen = row[ids].astype(np.float64)
        penalty = params.repetition_penalty
        penalised = np.where(seen > 0, seen / penalty, seen * penalty)
        row[ids] = np.where(np.isfinite(seen), np.clip(penalised, -_LARGEST, _LARGEST), seen)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        counts = Counter(request.tokens[request.num_prompt_tokens :])
        ids, times = _columns(counts, len(row))
        row[ids] -= params.presence_penalty + params.frequency_penalty * times
    return row


def _columns(values: Any, vocab_size: int) -> tuple[Ids, Row]:
    ids = np.fromiter(values.keys(), np.int64, len(values))
    numbers = np.fromiter(values.values(), np.float32, len(values))
    is_known = (ids >= 0) & (ids < vocab_size)
    return ids[is_known], numbers[is_known]


def _candidates(scaled: Row, params: SamplingParams) -> Ids | None:
    """The ids that may be drawn, best first; None where all may.

    First the ``top_k`` best; of these the smallest set of the best that holds ``top_p`` of their probability
    (Holtzman et al. 2020, arXiv:1904.09751, section 3.1); of these all with at least ``min_p`` of the best one's
    probability (Nguyen et al. 2024, arXiv:2407.01082, section 3). Equal tokens are ordered by id.
    """
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return None
    size = min(params.top_k or len(scaled), len(scaled))
    if params.top_p < 1.0:
        ids = _nucleus(scaled, size, params.top_p)
    elif size < len(scaled):
        ids = best_ids(scaled, size)
    else:
        ids = np.arange(len(scaled))
    if params.min_p > 0.0:
        ids = ids[scaled[ids] >= np.log(params.min_p)]
    return ids


def _nucleus(scaled: Row, size: int, top_p: float) -> Ids:
    weights = np.exp(scaled).astype(np.float64)
    total = weights.sum() if size == len(scaled) else weights[best_ids(scaled, size)].sum()
    length = min(_FIRST_SHORTLIST, size)
    while True:
        # Sorting the whole vocabulary takes milliseconds, and the nucleus is nearly always among the first few.
        ids = best_ids(scaled, length)
        sums = np.cumsum(weights[ids])
        if sums[-1] >= top_p * total or length == size:
            return ids[: int(np.searchsorted(sums, top_p * total)) + 1]
        length = min(length * _SHORTLIST_GROWTH, size)


def best_ids(scaled: Row, length: int) -> Ids:
    """The ids of the ``length`` largest numbers, largest first, equal ones by id."""
    if length < len(scaled):
        threshold = np.partition(scaled, len(scaled) - length)[len(scaled) - length]
        ids = np.flatnonzero(scaled >= threshold)
    else:
        ids = np.arange(len(scaled))
    return ids[np.argsort(-scaled[ids], kind="stable")[:length]]


def _random_bits(request: Request, vocab_size: int) -> npt.NDArray[np.uint32]:
    """32 random bits for each token id, by the seed and the number of the output token alone.

    Philox (Salmon et al. 2011, doi:10.1145/2063384.2063405) is a function from a key and a counter to bits: there is
    nothing to advance. Without a seed the key comes from the request's id, which stays the same when it is run again.
    """
    seed = request.sampling.seed
    if seed is None:
        digest = blake2b(request.id.encode(), digest_size=16).digest()
        key = np.frombuffer(digest, "<u8")
    else:
        key = np.array([seed & _64_BITS, 0], np.uint64)
    # The two low words of the counter run over the token ids.
    counter = np.array([0, 0, request.num_output_tokens, 0], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw((vocab_size + 1) // 2)
    return np.asarray(words, "<u8").view("<u4")[:vocab_size]


def _gumbel(bits: npt.NDArray[np.uint32]) -> Row:
    """Standard Gumbel noise: the argmax of it plus logits is a draw from their softmax.

    Source: Maddison, Tarlow and Minka (2014), arXiv:1411.0030, section 2. Small uniforms make the large values, which
    decide; there float32 has its full precision.
    """
    uniform = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    uniform = np.minimum(uniform, np.float32(1.0 - 2.0**-24))
    noise: Row = -np.log(-np.log1p(-uniform))
    return noise
