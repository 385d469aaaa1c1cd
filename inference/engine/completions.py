"""Whole answers of an engine that runs in the caller's own thread: for scripts, not for a running loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from inference.engine.contract import Engine
from inference.engine.request import StepOutput
from inference.protocol import ChatMessage, Failure, FinishReason, GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; exactly one of ``finish_reason`` and ``failure`` is set."""

    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: FinishReason | None
    failure: Failure | None


def generate(
    engine: Engine, prompts: Sequence[str | Sequence[ChatMessage]], sampling: SamplingParams
) -> list[Completion]:
    """Answer ``prompts`` together and return the answers in their order.

    Raises:
        RequestRefused: a prompt can never run; none of them was started.
    """
    requests = [_request(prompt, sampling) for prompt in prompts]
    encoded = [engine.encode(request) for request in requests]
    outputs: dict[str, list[StepOutput]] = {request.id: [] for request in requests}
    try:
        for request, token_ids in zip(requests, encoded, strict=True):
            engine.add_request(request.id, token_ids, sampling)
        while engine.has_unfinished:
            for output in engine.step():
                outputs[output.request_id].append(output)
    finally:
        for request in requests:
            engine.abort(request.id)
    return [_completion(each) for each in outputs.values()]


def _request(prompt: str | Sequence[ChatMessage], sampling: SamplingParams) -> GenerateRequest:
    request_id = uuid4().hex
    if isinstance(prompt, str):
        return GenerateRequest(request_id, "", sampling, 0.0, prompt=prompt)
    return GenerateRequest(request_id, "", sampling, 0.0, messages=tuple(prompt))


def _completion(outputs: Sequence[StepOutput]) -> Completion:
    last = outputs[-1]
    return Completion(
        text="".join(output.text for output in outputs),
        token_ids=tuple(output.token_id for output in outputs if output.failure is None),
        num_prompt_tokens=last.num_prompt_tokens,
        finish_reason=last.finish_reason,
        failure=last.failure,
    )
