"""The engine: requests in, tokens and text out, one step at a time.

A step is: plan who computes what, run one forward pass, choose the next tokens, commit them, turn them into text. One
thread calls it; ``encode`` alone may be called from any.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self
from uuid import uuid4

import torch
from tokenizers import Tokenizer
from torch import Tensor

from inference.artifact import Manifest, verify
from inference.config import EngineConfig, InvalidConfig, ModelConfig
from inference.engine.block_pool import BlockPool
from inference.engine.detokenizer import Detokenizer
from inference.engine.kv_cache import KVCache, count_blocks
from inference.engine.prompt import PromptEncoder, load_tokenizer
from inference.engine.request import Request, RequestRefused, StepOutput
from inference.engine.runner import Runner
from inference.engine.sampler import sample
from inference.engine.scheduler import Scheduler, SchedulerLimits
from inference.models.decoder import Decoder
from inference.models.numerics import DTYPES, describe_numerics
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

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        model: ModelConfig,
        max_num_seqs: int,
        fingerprint: str,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._fingerprint = fingerprint
        self._streams: dict[str, _Stream] = {}

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """The engine of ``config.artifact``, with every file checked against its digest.

        Torch's number of threads is set for the whole process.

        Raises:
            BrokenArtifact: the artifact is damaged or incomplete.
            InvalidConfig: the settings and the model do not go together.
        """
        num_threads = config.num_threads or max(len(os.sched_getaffinity(0)) - 1, 1)
        torch.set_num_threads(num_threads)
        manifest = verify(config.artifact)
        max_model_len = _max_model_len(config, manifest.model)
        tokenizer = load_tokenizer(config.artifact)
        runner = _load_runner(config, manifest, max_model_len, tokenizer)
        engine = cls(
            runner=runner,
            scheduler=_new_scheduler(config, manifest.model, max_model_len, runner.num_blocks),
            tokenizer=tokenizer,
            encoder=PromptEncoder.load(config.artifact),
            model=manifest.model,
            max_num_seqs=config.max_num_seqs,
            fingerprint=_fingerprint(config, manifest),
        )
        logger.info(
            "engine loaded artifact=%s fingerprint=%s threads=%d max_model_len=%d kv_blocks=%d",
            config.artifact.name,
            engine.fingerprint,
            num_threads,
            max_model_len,
            runner.num_blocks,
        )
        return engine

    @property
    def fingerprint(self) -> str:
        """Names the numerics: two engines with equal fingerprints give a request the same tokens."""
        return self._fingerprint

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do."""
        return self._scheduler.num_unfinished > 0

    @property
    def num_preemptions(self) -> int:
        """How often a request had to give its blocks back, since the start."""
        return self._scheduler.num_preemptions

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
    pairs = zip(torch.split(logits, 1), requests, strict=True)
    return [token_id for row, request in pairs for token_id in _sample(row, [request])]


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


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len > model.context_length:
        raise InvalidConfig(
            f"max_model_len={config.max_model_len} is more than the model's context of {model.context_length}."
        )
    return config.max_model_len or model.context_length


def _load_runner(
    config: EngineConfig, manifest: Manifest, max_model_len: int, tokenizer: Tokenizer
) -> Runner:
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device='cuda' needs a CUDA device and torch built for it; use 'cpu'.")
    model = manifest.model
    num_blocks = count_blocks(config, model, max_model_len=max_model_len, item_size=dtype.itemsize)
    decoder = Decoder.load(
        config.artifact, manifest, num_positions=max_model_len, dtype=dtype, device=device
    )
    cache = KVCache(
        model, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, device=device
    )
    num_token_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return Runner(decoder, cache, num_token_ids=num_token_ids)


def _new_scheduler(
    config: EngineConfig, model: ModelConfig, max_model_len: int, num_blocks: int
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_tokens=config.long_prefill_tokens,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(model.eos_token_ids),
    )
    return Scheduler(limits, BlockPool(num_blocks, config.block_size))


def _fingerprint(config: EngineConfig, manifest: Manifest) -> str:
    """A digest over all that may change a token: the model, its text, the arithmetic, the machine."""
    facts = {
        "model": manifest.model.to_dict(),
        "weights": manifest.weights_digest,
        "tokenizer": manifest.tokenizer_digest,
        "chat_template": manifest.chat_template_digest,
        "block_size": config.block_size,
        **describe_numerics(DTYPES[config.dtype], torch.device(config.device)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
