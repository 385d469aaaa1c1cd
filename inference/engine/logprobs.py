"""Log-probabilities of tokens: the model's own, whatever was done to its logits before a token was chosen.

``logprob = logit - log(sum(exp(logits)))`` over the whole vocabulary, from the float32 logits as the model gave them:
before logit bias, penalties, temperature, top-k, top-p and min-p. Each row is reduced by itself and always in the same
order, so that the value has the same bits whatever shares the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inference.engine.request import Request
from inference.engine.sampler import Row, best_ids
from inference.engine.token_texts import TokenTexts
from inference.protocol import TokenLogprob


@dataclass(frozen=True, slots=True)
class ChosenLogprob:
    """The log-probability of the token that was chosen, and the best ids in its place with theirs, best first."""

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...]


def read_logprobs(
    logits: torch.Tensor, requests: Sequence[Request], token_ids: Sequence[int | None]
) -> dict[str, ChosenLogprob]:
    """By the id of each request that asked for it; ``logits`` is ``[num_rows, vocab]``, row ``i`` for ``requests[i]``.

    A request without a token has no log-probability either.
    """
    return {
        request.id: _read(to_numpy(row), token_id, num_best)
        for row, request, token_id in zip(logits, requests, token_ids, strict=True)
        if (num_best := request.sampling.logprobs) is not None and token_id is not None
    }


def to_numpy(logits: torch.Tensor) -> Row:
    """Logits of one row or of several, in host memory; not copied where they are there already."""
    array: Row = logits.detach().to("cpu", torch.float32).numpy()
    return array


def log_normalizer(row: Row) -> float:
    """``log(sum(exp(row)))``: the sum is one of float64, in numpy's order for one contiguous row."""
    highest = row.max()
    total: float = np.exp(row - highest).sum(dtype=np.float64)
    return float(highest) + float(np.log(total))


def logprob_of(row: Row, token_id: int, normalizer: float) -> float:
    """The natural logarithm of the token's probability: a float32, in its shortest decimal form."""
    return float(str(np.float32(float(row[token_id]) - normalizer)))


def describe(chosen: ChosenLogprob, texts: TokenTexts, *, at_start: bool) -> TokenLogprob | None:
    """With texts instead of ids; None for a token that has no text, such as the end of a sequence."""
    if texts.is_silent(chosen.token_id):
        return None
    return TokenLogprob(
        texts.text_of(chosen.token_id, at_start=at_start),
        chosen.logprob,
        tuple([(texts.text_of(each, at_start=at_start), logprob) for each, logprob in chosen.best]),
    )


def _read(row: Row, token_id: int, num_best: int) -> ChosenLogprob:
    normalizer = log_normalizer(row)
    ids = best_ids(row, min(num_best, len(row))) if num_best else ()
    best = tuple(
        [(int(each), logprob_of(row, each, normalizer)) for each in ids if np.isfinite(row[each])]
    )
    return ChosenLogprob(token_id, logprob_of(row, token_id, normalizer), best)
