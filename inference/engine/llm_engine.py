"""The engine: requests in, tokens and text out, one step at a time.

A step is: plan who computes what, run one forward pass, choose the next tokens, commit them, turn them into text. One
thread calls it; ``encode`` alone may be called from any.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self
from uuid import uuid4

from torch import Tensor

from inference.config import EngineConfig
from inference.engine.detokenizer import Detokenizer
from inference.engine.memory import MARGIN_BYTES, Usage, available_bytes
from inference.engine.parts import Parts, load_parts
from inference.engine.request import Request, RequestRefused, StepOutput
from inference.engine.sampler import sample
from inference.protocol import ChatMessage, Failure, FinishReason, GenerateRequest, SamplingParams

logger = logging.getLogger(__name__)

NO_TOKEN = -1
"""The ``token_id`` of an output that has a failure instead of a token."""

GENERATION_FAILED = Failure(
    "generation_failed",
    "The answer broke off: its next token, or the token's text, is not valid. Try again; if that "
    "fails too, this version of the model is broken.",
    HTTPStatus.INTERNAL_SERVER_ERROR,
)

_WARM_UP_TOKENS = 16
_WAIT_FOR_MEMORY_S = 0.05


class WarmUpFailed(RuntimeError):
    """The first forward pass gave no valid token: this version must not take requests."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer of ``generate``; exactly one of ``finish_reason`` and ``failure`` is set."""

    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: FinishReason | None
    failure: Failure | None


@dataclass(slots=True)
class _Stream:
    """What the engine knows of an unfinished request besides its tokens."""

    request: Request
    detokenizer: Detokenizer
    started_at: float = math.inf


class LLMEngine:
    """One version's weights, cache and unfinished requests, in this process."""

    def __init__(self, parts: Parts, *, max_num_seqs: int, is_on_cpu: bool) -> None:
        self._runner = parts.runner
        self._scheduler = parts.scheduler
        self._pool = parts.pool
        self._tokenizer = parts.tokenizer
        self._encoder = parts.encoder
        self._model = parts.model
        self._sizes = parts.sizes
        self._fingerprint = parts.fingerprint
        self._generation_defaults = parts.generation_defaults
        self._max_num_seqs = max_num_seqs
        self._is_on_cpu = is_on_cpu
        self._streams: dict[str, _Stream] = {}

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """The engine of ``config.artifact``, with the KV cache of a standby, which grows with the first request.

        Torch's number of threads is set for the whole process.

        Raises:
            BrokenArtifact: the artifact is damaged or incomplete.
            InvalidConfig: the settings and the model do not go together.
            NotEnoughMemory: it does not fit beside what runs already.
        """
        parts = load_parts(config)
        return cls(parts, max_num_seqs=config.max_num_seqs, is_on_cpu=config.device == "cpu")

    @property
    def fingerprint(self) -> str:
        """Names the numerics: two engines with equal fingerprints give a request the same tokens."""
        return self._fingerprint

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """The version's sampling for parameters that a request leaves out; ``add_request`` does not apply it."""
        return self._generation_defaults

    @property
    def kernel(self) -> str:
        """What computes a step: ``torch``, or the native library with its instruction set."""
        return self._runner.describe_numerics()["kernel"]

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do."""
        return self._scheduler.num_unfinished > 0

    @property
    def num_preemptions(self) -> int:
        """How often a request had to give its blocks back, since the start."""
        return self._scheduler.num_preemptions

    def usage(self) -> Usage:
        """What it holds now. Any thread may ask."""
        return Usage(
            kv_blocks=self._pool.num_blocks - 1,
            kv_blocks_used=self._pool.num_held,
            kv_blocks_full=self._sizes.full_blocks - 1,
            weight_bytes=self._sizes.weight_bytes,
        )

    def room(self) -> int:
        """How many more requests should be added now: as many as can run at once.

        What waits here is out of a rollback's reach, so the backlog stays in the queue.
        """
        return max(self._max_num_seqs - self._scheduler.num_unfinished, 0)

    def encode(self, request: GenerateRequest) -> tuple[int, ...]:
        """The prompt's tokens. Any thread may call it.

        Raises:
            RequestRefused: the prompt cannot be encoded.
        """
        return self._encoder.encode(request)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        """Accept a request: it ends by a last output of ``step``, or by ``abort``.

        Raises:
            RequestRefused: it can never run; the engine has not kept it.
            ValueError: a request of this id is unfinished.
        """
        self._check_token_ids(prompt_token_ids)
        request = Request.from_prompt(request_id, prompt_token_ids, sampling)
        detokenizer = Detokenizer(self._tokenizer, prompt_token_ids, sampling.stop)
        self._scheduler.add(request)
        self._streams[request_id] = _Stream(request, detokenizer)
        # Whoever is asked is no standby, whatever its role: the route may be ahead of what this process was told.
        self._grow_kv()

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks, in any state; False if it is not here."""
        self._streams.pop(request_id, None)
        return self._scheduler.abort(request_id)

    def step(self) -> list[StepOutput]:
        """Compute one step and return what it adds to each request; empty if nothing is unfinished.

        A request that fails ends with an output that has a ``failure``, and touches no other. If the step as a whole
        raises, nothing was committed.
        """
        plan = self._scheduler.plan()
        if not plan.rows:
            self._wait_for_blocks()
            return []
        now = time.monotonic()
        for row in plan.rows:
            stream = self._streams[row.request.id]
            stream.started_at = min(stream.started_at, now)
        requests = [row.request for row in plan.rows if row.samples]
        token_ids = _sample(self._runner.run(plan), requests)
        chosen = {
            request.id: token_id
            for request, token_id in zip(requests, token_ids, strict=True)
            if token_id is not None
        }
        outputs = [
            self._fail(each, index=each.num_output_tokens)
            for each in requests
            if each.id not in chosen
        ]
        outputs += [self._advance(request) for request in self._scheduler.commit(plan, chosen)]
        return outputs

    def resize_kv(self, *, is_standby: bool) -> bool:
        """Bring the KV cache to the size of a standby, or to its full one; between steps.

        Blocks that are held are copied, so no request is lost and no token changes; what lies beyond the smaller size
        must be free first. Whether a prompt is accepted does not depend on it: the cache will grow when needed.

        Returns:
            Whether it has that size now. Ask again later: requests end, and memory comes free.
        """
        return self._shrink_kv() if is_standby else self._grow_kv()

    def warm_up(self) -> None:
        """Compute a prompt and, where it fits, a decode with the real weights; before the first request only.

        Raises:
            WarmUpFailed: a pass gave no valid token.
        """
        longest = self._scheduler.max_sequence_tokens
        num_tokens = min(_WARM_UP_TOKENS, longest - 1, self._model.vocab_size)
        num_outputs = min(2, longest - num_tokens)
        sampling = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True)
        started_at = time.monotonic()
        self.add_request("warm-up", range(num_tokens), sampling)
        while self.has_unfinished:
            for output in self.step():
                if output.failure is not None:
                    raise WarmUpFailed(output.failure.message)
        logger.info("engine warm seconds=%.2f", time.monotonic() - started_at)

    def generate(
        self, prompts: Sequence[str | Sequence[ChatMessage]], sampling: SamplingParams
    ) -> list[Completion]:
        """Answer ``prompts`` together and return the answers in their order; for scripts, not for a running loop.

        Raises:
            RequestRefused: a prompt can never run; none of them was started.
        """
        requests = [_request(prompt, sampling) for prompt in prompts]
        encoded = [self.encode(request) for request in requests]
        outputs: dict[str, list[StepOutput]] = {request.id: [] for request in requests}
        try:
            for request, token_ids in zip(requests, encoded, strict=True):
                self.add_request(request.id, token_ids, sampling)
            while self.has_unfinished:
                for output in self.step():
                    outputs[output.request_id].append(output)
        finally:
            for request in requests:
                self.abort(request.id)
        return [_completion(each) for each in outputs.values()]

    def check_integrity(self) -> None:
        """Compare the block pool with the block tables, in idle moments and tests; raises ``BrokenPool``."""
        self._scheduler.check_integrity()

    def _grow_kv(self) -> bool:
        """As far as memory allows, but not by little: each time all that is held is copied."""
        before, full = self._pool.num_blocks, self._sizes.full_blocks
        if before == full:
            return True
        wanted = min(full, before + self._affordable_blocks())
        if wanted < min(full, 2 * before):
            return False
        try:
            self._runner.resize(wanted, self._pool.held_blocks)
        except MemoryError:
            logger.exception("kv cache cannot grow blocks=%d wanted=%d", before, wanted)
            return False
        self._pool.grow(wanted)
        logger.info("kv cache grown blocks=%d before=%d full=%d", wanted, before, full)
        return wanted == full

    def _affordable_blocks(self) -> int:
        available = available_bytes() if self._is_on_cpu else None
        if available is None:
            return self._sizes.full_blocks
        return max(available - MARGIN_BYTES, 0) // self._sizes.kv_block_bytes

    def _shrink_kv(self) -> bool:
        before, standby = self._pool.num_blocks, self._sizes.standby_blocks
        if before == standby:
            return True
        if not self._pool.shrink(standby):
            return False
        try:
            self._runner.resize(standby, self._pool.held_blocks)
        except MemoryError:
            self._pool.grow(before)
            return False
        logger.info("kv cache shrunk blocks=%d before=%d", standby, before)
        return True

    def _wait_for_blocks(self) -> None:
        """Only a cache that may grow leaves requests without a row; while it cannot, nobody is refused."""
        if self.has_unfinished and not self._grow_kv():
            time.sleep(_WAIT_FOR_MEMORY_S)

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        # One bad id would fail the whole step, and with it everybody's.
        last = self._model.vocab_size - 1
        for bad in (token_id for token_id in token_ids if not 0 <= token_id <= last):
            message = f"prompt token {bad} is not in the vocabulary; use ids from 0 to {last}."
            failure = Failure("invalid_request", message, HTTPStatus.BAD_REQUEST, param="prompt")
            raise RequestRefused(failure)

    def _advance(self, request: Request) -> StepOutput:
        """The output of a request that has just gained a token; its text may end it."""
        stream = self._streams[request.id]
        try:
            text, is_stopped = _text_of_last_token(stream)
        except Exception:
            logger.exception("text failed request=%s", request.id)
            return self._fail(request, index=request.num_output_tokens - 1)
        if is_stopped:
            self._scheduler.finish(request.id, FinishReason.STOP)
        reason = FinishReason.STOP if is_stopped else request.finish_reason
        if reason is not None:
            del self._streams[request.id]
        return StepOutput(
            request_id=request.id,
            index=request.num_output_tokens - 1,
            token_id=request.tokens[-1],
            text=text,
            finish_reason=reason,
            failure=None,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            started_at=stream.started_at,
        )

    def _fail(self, request: Request, *, index: int) -> StepOutput:
        """End ``request`` with a failure in place of output token ``index``."""
        stream = self._streams.pop(request.id)
        self._scheduler.abort(request.id)
        return StepOutput(
            request_id=request.id,
            index=index,
            token_id=NO_TOKEN,
            text="",
            finish_reason=None,
            failure=GENERATION_FAILED,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=index,
            started_at=stream.started_at,
        )


def _text_of_last_token(stream: _Stream) -> tuple[str, bool]:
    """Text that the last token makes certain, and whether it completes a stop string."""
    request, detokenizer = stream.request, stream.detokenizer
    if request.finish_reason is FinishReason.STOP:  # the end-of-sequence token, which is no text
        return detokenizer.flush(), False
    text, is_stopped = detokenizer.push(request.tokens[-1])
    if request.is_finished and not is_stopped:
        text += detokenizer.flush()
    return text, is_stopped


def _sample(logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
    """As ``sample``, but what raises for one request gives None for that one."""
    try:
        return sample(logits, requests)
    except Exception:
        logger.exception("sampling failed requests=%s", [request.id for request in requests])
    if len(requests) == 1:
        return [None]
    return [
        token_id
        for row, request in zip(logits, requests, strict=True)
        for token_id in _sample(row[None], [request])
    ]


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
