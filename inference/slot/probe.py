"""The first answers of a version that was just loaded: is it warm, does it compute numbers, which tokens does it give?

The prompts take the way of every request: template, tokens, steps. They are the same for ever, so that two engines of
one fingerprint can be compared by the digest of what they answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence

from inference.engine.contract import Engine
from inference.engine.request import RequestRefused
from inference.protocol import ChatMessage, GenerateRequest, SamplingParams

logger = logging.getLogger(__name__)

NUM_TOKENS = 8
PROMPTS: Sequence[str | ChatMessage] = (
    "Hello",
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    ChatMessage("user", "What is the opposite of cold? Answer with one word."),
)

_SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


class ProbeFailed(RuntimeError):
    """What was loaded gives no valid answer, so it must not be given requests."""


def probe(engine: Engine) -> str:
    """Answer the fixed prompts together, and return a digest of the tokens; before the first request only.

    A prompt that the version refuses (it has no chat template, its context is shorter) counts as an answer of its own.

    Raises:
        ProbeFailed: an answer broke off, because its logits are no numbers, or no prompt was accepted.
    """
    started_at = time.monotonic()
    answers = {f"probe-{index}": list[int]() for index in range(len(PROMPTS))}
    refusals = [reason for each in answers if (reason := _add(engine, each))]
    if len(refusals) == len(answers):
        raise ProbeFailed(f"it refuses even the simplest prompts: {refusals[0]}")
    while engine.has_unfinished:
        for output in engine.step():
            if output.failure is not None:
                raise ProbeFailed(
                    f"it gave no valid token {output.index} for a fixed prompt, so its numbers are broken (NaN or "
                    "infinite weights, or a dtype too narrow for them). Import the weights again, or use another dtype."
                )
            answers[output.request_id].append(output.token_id)
    digest = hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]
    logger.info("engine probed digest=%s seconds=%.2f", digest, time.monotonic() - started_at)
    return digest


def _add(engine: Engine, request_id: str) -> str | None:
    """Start the prompt of this name; why not, if it is refused."""
    prompt = PROMPTS[int(request_id.removeprefix("probe-"))]
    if isinstance(prompt, str):
        request = GenerateRequest(request_id, "", _SAMPLING, 60.0, prompt=prompt)
    else:
        request = GenerateRequest(request_id, "", _SAMPLING, 60.0, messages=(prompt,))
    try:
        engine.add_request(request_id, engine.encode(request), _SAMPLING)
    except RequestRefused as refusal:
        return refusal.failure.message
    return None
