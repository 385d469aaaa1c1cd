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

from torch import Tensor

from inference.config import EngineConfig
from inference.engine.choices import make_choices, sequence_id
from inference.engine.completions import Completion, generate
from inference.engine.detokenizer import Detokenizer
from inference.engine.kv_memory import KVMemory
from inference.engine.logprobs import ChosenLogprob, describe, read_logprobs
from inference.engine.memory import Usage
from inference.engine.parts import Parts, load_parts
from inference.engine.plan import StepPlan
from inference.engine.prompt import check_token_ids
from inference.engine.request import Request, StepOutput
from inference.engine.sampler import sample
from inference.engine.scoring import Scorer, scoring_request
from inference.engine.token_texts import TokenTexts
from inference.protocol import (
    MAX_CHOICES,
    ChatMessage,
    Failure,
    FinishReason,
    GenerateRequest,
    SamplingParams,
)

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
        self.telemetry = parts.telemetry
        self._max_num_seqs = max_num_seqs
        self._memory = KVMemory(parts, is_on_cpu=is_on_cpu)
        self._texts = TokenTexts(parts.tokenizer)
        self._scorer = Scorer(parts.runner)
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
        """What computes a step, and in which numbers; the number of threads where it may change a sum."""
        facts = self._runner.describe_numerics()
        parts = [facts["kernel"], facts["kept_as"].removeprefix("torch.")]
        if "num_threads" in facts:
            parts.append(f"threads {facts['num_threads']}")
        return ", ".join(parts)

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
            kv_blocks_cached=self._pool.cache.num_idle,
            weight_bytes=self._sizes.weight_bytes,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_swaps=self._scheduler.num_swaps,
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

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """The tokens of an answer behind its prompt. Any thread may call it.

        Raises:
            RequestRefused: the text cannot be encoded.
        """
        return self._encoder.encode_answer(text)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        n: int = 1,
        cache_salt: str = "",
        scored_token_ids: Sequence[int] = (),
    ) -> None:
        """Accept a request: each of its ``n`` choices ends by a last output of ``step``, or all by ``abort``.

        Only requests of the same ``cache_salt`` use each other's blocks. With ``scored_token_ids`` nothing is generated:
        they are the answer, and its one output tells their score.

        Raises:
            RequestRefused: it can never run; the engine has not kept it.
            ValueError: a request of this id is unfinished.
        """
        check_token_ids((*prompt_token_ids, *scored_token_ids), self._model.vocab_size)
        if any(self._sequences_of(request_id)):
            raise ValueError(f"Request {request_id} is already here; finish or abort it first.")
        if answer := tuple(scored_token_ids):
            requests = [
                scoring_request(request_id, prompt_token_ids, answer, cache_salt=cache_salt)
            ]
        else:
            requests = make_choices(
                request_id, prompt_token_ids, sampling, n=n, cache_salt=cache_salt
            )
        for request in requests:
            detokenizer = Detokenizer(self._tokenizer, prompt_token_ids, sampling.stop)
            self._scheduler.add(request)
            self._streams[request.id] = _Stream(request, detokenizer)
        if answer:
            self._scorer.add(requests[0], answer)
        # Whoever is asked is no standby, whatever its role: the route may be ahead of what this process was told.
        self._memory.grow()

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks, in any state; False if it is not here."""
        sequences = self._sequences_of(request_id)
        for each in sequences:
            del self._streams[each]
            self.telemetry.forgive(each)
            self._scheduler.abort(each)
            self._scorer.forget(each)
        return bool(sequences)

    def step(self) -> list[StepOutput]:
        """Compute one step and return what it adds to each request; empty if nothing is unfinished.

        A request that fails ends with an output that has a ``failure``, and touches no other. If the step as a whole
        raises, nothing was committed.
        """
        began_at = time.perf_counter()
        plan = self._scheduler.plan()
        if not plan.rows:
            self._wait_for_blocks()
            return []
        now = time.monotonic()
        for row in plan.rows:
            stream = self._streams[row.request.id]
            stream.started_at = min(stream.started_at, now)
        chosen, logprobs = self._choose(plan)
        outputs = [
            self._fail(row.request, index=row.request.num_output_tokens)
            for row in plan.rows
            if row.samples and row.request.id not in chosen
        ]
        outputs += [
            self._advance(request, logprobs.get(request.id))
            for request in self._scheduler.commit(plan, chosen)
        ]
        return self.telemetry.bill(plan.rows, outputs, time.perf_counter() - began_at)

    def resize_kv(self, *, is_standby: bool) -> bool:
        """Bring the KV cache to the size of a standby, or to its full one; between steps.

        Blocks that are held are copied, so no request is lost and no token changes; what lies beyond the smaller size
        must be free first. Whether a prompt is accepted does not depend on it: the cache will grow when needed.

        Returns:
            Whether it has that size now. Ask again later: requests end, and memory comes free.
        """
        return self._memory.shrink() if is_standby else self._memory.grow()

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
        return generate(self, prompts, sampling)

    def check_integrity(self) -> None:
        """Compare the block pool with the block tables, in idle moments and tests; raises ``BrokenPool``."""
        self._scheduler.check_integrity()

    def _wait_for_blocks(self) -> None:
        """Only a cache that may grow leaves requests without a row; while it cannot, nobody is refused."""
        if self.has_unfinished and not self._memory.grow():
            time.sleep(_WAIT_FOR_MEMORY_S)

    def _choose(self, plan: StepPlan) -> tuple[dict[str, int], dict[str, ChosenLogprob]]:
        """Compute ``plan``: the token of each row that samples and can be trusted, and how probable it was."""
        plain, scored = self._scorer.take_out(plan)
        requests = [row.request for row in plain.rows if row.samples]
        logits = self._compute(plain)
        token_ids = _sample(logits, requests)
        chosen = {
            request.id: token_id
            for request, token_id in zip(requests, token_ids, strict=True)
            if token_id is not None
        }
        logprobs = read_logprobs(logits, requests, token_ids)
        return chosen | self._scorer.compute(scored), logprobs

    def _compute(self, plan: StepPlan) -> Tensor:
        """Logits of the rows of ``plan`` that sample; what it took tells what a preemption would cost."""
        began_at = time.perf_counter()
        num_moves = self._runner.move(plan)
        moved_at = time.perf_counter()
        logits = self._runner.run(plan)
        self._scheduler.costs.observe_moves(num_moves, moved_at - began_at)
        self._scheduler.costs.observe_step(plan, time.perf_counter() - moved_at)
        return logits

    def _sequences_of(self, request_id: str) -> list[str]:
        """The ids of its unfinished choices."""
        ids = (sequence_id(request_id, choice) for choice in range(MAX_CHOICES))
        return [each for each in ids if each in self._streams]

    def _advance(self, request: Request, chosen: ChosenLogprob | None) -> StepOutput:
        """The output of a request that has just gained a token; its text may end it."""
        stream = self._streams[request.id]
        if score := self._scorer.take_output(request, stream.started_at):
            del self._streams[request.id]
            return score
        is_at_start = stream.detokenizer.is_at_start
        try:
            text, is_stopped = _text_of_last_token(stream)
            logprob = describe(chosen, self._texts, at_start=is_at_start) if chosen else None
        except Exception:
            logger.exception("text failed request=%s", request.id)
            return self._fail(request, index=request.num_output_tokens - 1)
        if is_stopped:
            self._scheduler.finish(request.id, FinishReason.STOP)
        reason = FinishReason.STOP if is_stopped else request.finish_reason
        if reason is not None:
            del self._streams[request.id]
        return StepOutput(
            request_id=request.request_id,
            choice=request.choice,
            index=request.num_output_tokens - 1,
            token_id=request.tokens[-1],
            text=text,
            finish_reason=reason,
            failure=None,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            started_at=stream.started_at,
            logprob=logprob,
        )

    def _fail(self, request: Request, *, index: int) -> StepOutput:
        """End ``request`` with a failure in place of output token ``index``."""
        stream = self._streams.pop(request.id)
        self._scheduler.abort(request.id, is_broken=True)
        self._scorer.forget(request.id)
        return StepOutput(
            request_id=request.request_id,
            choice=request.choice,
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
