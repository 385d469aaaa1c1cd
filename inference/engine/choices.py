"""The further answers to one prompt: each is a sequence of its own that shares the prompt of the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from inference.engine.request import Request
from inference.protocol import SamplingParams


def sequence_id(request_id: str, choice: int) -> str:
    """The id of a choice among all sequences of an engine; that of the first is the request's own."""
    return f"{request_id}#{choice}" if choice else request_id


def choice_sampling(sampling: SamplingParams, request_id: str, choice: int) -> SamplingParams:
    """``sampling`` with the seed of a choice.

    The first one keeps what it has, so that it is the answer of a request for one. Any other is what a request for one
    with its seed would get: noise follows from (seed, output index), and the seed from (seed, choice), or without a
    seed from (request id, choice).
    """
    if choice == 0:
        return sampling
    origin = request_id if sampling.seed is None else str(sampling.seed)
    kind = "id" if sampling.seed is None else "seed"
    digest = sha256(f"{kind} {choice} {origin}".encode("utf-8", "surrogatepass")).digest()
    return replace(sampling, seed=int.from_bytes(digest[:8], "little", signed=True))


def make_choices(
    request_id: str,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    n: int = 1,
    cache_salt: str = "",
) -> list[Request]:
    """``n`` sequences that begin with the same prompt, the first the parent of the others."""
    first, *others = (
        Request.from_prompt(
            sequence_id(request_id, choice),
            prompt_token_ids,
            choice_sampling(sampling, request_id, choice),
        )
        for choice in range(n)
    )
    for choice, request in enumerate(others, 1):
        request.choice, request.parent = choice, first
    for request in (first, *others):
        request.cache_salt = cache_salt
    return [first, *others]
