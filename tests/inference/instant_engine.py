"""An engine without a model: token ``i`` of every request is the text ``t{i} ``, at once or after a pause.

Further choices say which they are, and each ends a token later than the one before. A text that is scored has a token a
word, of which the engine would have said every other one itself. With a *voice* the text names the voice and the prompt as well, so that an answer says which version gave it, and to
which question. It obeys the same protocol as the real one and fails on demand, by words in the prompt:
``poison`` raises in a step, ``die`` ends the process there, ``hang`` never returns, ``refuse`` is refused when it is
encoded, ``too long`` when it is added, ``nan`` fails alone after two tokens, ``slow`` has no token before ``SLOW_STEPS``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from inference.config import EngineConfig
from inference.engine.memory import Usage
from inference.engine.request import RequestRefused, StepOutput
from inference.engine.telemetry import ModelCost, Telemetry
from inference.protocol import (
    Failure,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Score,
    TokenLogprob,
)

DEFAULT_TOKENS = 8
SLOW_STEPS = 100
WORDS = ("poison", "die", "hang", "too long", "nan", "slow")


def golden_text(num_tokens: int, *, voice: str = "", prompt: str = "", choice: int = 0) -> str:
    """The whole answer of that many tokens; without a voice it is the same to every prompt."""
    mark = crc32(prompt.encode())
    return "".join(_piece(voice, mark, i, choice) for i in range(num_tokens))


def golden_logprob(text: str, index: int, num_best: int) -> TokenLogprob:
    """What comes with a token."""
    best = [(text, _golden_value(index)), *((f"other{i} ", -1.0 - i) for i in range(num_best))]
    return TokenLogprob(text, _golden_value(index), tuple(best[:num_best]))


def golden_score(text: str) -> Score:
    """What comes of an answer to be scored."""
    num_tokens = len(text.split())
    return Score(tuple(map(_golden_value, range(num_tokens))), (num_tokens + 1) // 2)


def _golden_value(index: int) -> float:
    return -(index + 1) / 8


def _piece(voice: str, mark: int, index: int, choice: int) -> str:
    name = f"{index}#{choice}" if choice else f"{index}"
    return f"{voice}.{mark:08x}.{name} " if voice else f"t{name} "


@dataclass(slots=True)
class Running:
    """A request and how far it is."""

    id: str
    words: set[str]
    num_prompt_tokens: int
    num_tokens: int
    sampling: SamplingParams
    mark: int = 0
    choice: int = 0
    score: Score | None = None
    num_done: int = 0
    num_steps: int = 0
    started_at: float = field(default_factory=time.monotonic)


class InstantEngine:
    """Gives every running request one token per step."""

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        max_requests: int = 16,
        fingerprint: str = "instant",
        voice: str = "",
    ) -> None:
        self.fingerprint = fingerprint
        self._voice = voice
        self.generation_defaults: Mapping[str, Any] = {}
        self.telemetry = Telemetry(ModelCost(0, 0, 0, 0, 0))  # it computes nothing
        self.kernel = "instant"
        self.batches: list[list[str]] = []
        self.samplings: dict[str, SamplingParams] = {}
        self.salts: dict[str, str] = {}
        self._step_s = step_s
        self._max_requests = max_requests
        self.num_blocks = 1
        self._running: dict[tuple[str, int], Running] = {}
        self._owner: int | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether any request runs."""
        return bool(self._running)

    def usage(self) -> Usage:
        """As if each request held one block."""
        return Usage(self.num_blocks, len(self._running), self._max_requests, 1)

    def resize_kv(self, *, is_standby: bool) -> bool:
        """Pretend to."""
        self._check_thread()
        self.num_blocks = 1 if is_standby else self._max_requests
        return True

    def room(self) -> int:
        """What is free of ``max_requests``."""
        return self._max_requests - len(self._running)

    def encode(self, request: GenerateRequest) -> tuple[int, ...]:
        """One token per word, with the words that mean a fault as negative ones; a voice needs the prompt's mark."""
        text = request.prompt or " ".join(each.content for each in request.messages or ())
        if "refuse" in text:
            raise RequestRefused(Failure("invalid_prompt", "The prompt is refused.", 400, "prompt"))
        faults = [-1 - i for i, word in enumerate(WORDS) if word in text]
        mark = [crc32(text.encode())] if self._voice else []
        return (*mark, *faults, *range(len(text.split())))

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """One token per word."""
        return tuple(range(len(text.split())))

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
        """Run it from the next step on."""
        self._check_thread()
        if (request_id, 0) in self._running:
            raise ValueError(f"Request {request_id} runs already.")
        words = {WORDS[-1 - token] for token in prompt_token_ids if token < 0}
        if "too long" in words:
            failure = Failure("context_length_exceeded", "The prompt is too long.", 400, "prompt")
            raise RequestRefused(failure)
        self.samplings[request_id] = sampling
        self.salts[request_id] = cache_salt
        num_tokens = sampling.max_tokens or DEFAULT_TOKENS
        score = golden_score("word " * len(scored_token_ids)) if scored_token_ids else None
        for choice in range(n):
            self._running[request_id, choice] = Running(
                request_id,
                words,
                len(prompt_token_ids),
                num_tokens + choice if score is None else 1,
                sampling,
                mark=prompt_token_ids[0] if self._voice else 0,
                choice=choice,
                score=score,
            )

    def abort(self, request_id: str) -> bool:
        """Forget it."""
        self._check_thread()
        choices = [key for key in self._running if key[0] == request_id]
        for key in choices:
            del self._running[key]
        return bool(choices)

    def step(self) -> list[StepOutput]:
        """One token for each."""
        self._check_thread()
        self.batches.append([each.id for each in self._running.values()])
        time.sleep(self._step_s)
        return [self._advance(each) for each in list(self._running.values()) if _is_due(each)]

    def _advance(self, request: Running) -> StepOutput:
        if "die" in request.words:
            os._exit(9)
        if "poison" in request.words:
            raise RuntimeError("poisoned")
        if "hang" in request.words:
            threading.Event().wait()
        index = request.num_done
        request.num_done += 1
        is_last = request.num_done == request.num_tokens
        failure = None
        if "nan" in request.words and index == 2:
            failure = Failure("numerical_error", "The logits are not numbers.", 500)
        if is_last or failure:
            del self._running[request.id, request.choice]
        text = _piece(self._voice, request.mark, index, request.choice) if not request.score else ""
        num_best = request.sampling.logprobs
        return StepOutput(
            request_id=request.id,
            index=index,
            token_id=index,
            text=text,
            finish_reason=_reason(request) if is_last and not failure else None,
            failure=failure,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_done
            if not request.score
            else len(request.score.logprobs),
            started_at=request.started_at,
            choice=request.choice,
            logprob=None if num_best is None else golden_logprob(text, index, num_best),
            score=request.score,
        )

    def _check_thread(self) -> None:
        """The first thread that adds, steps or aborts owns the engine."""
        self._owner = self._owner or threading.get_ident()
        if self._owner != threading.get_ident():
            raise RuntimeError("The engine was touched by a second thread.")


def _reason(request: Running) -> FinishReason:
    return FinishReason.STOP if request.score else FinishReason.LENGTH


def _is_due(request: Running) -> bool:
    """Whether this step gives it a token."""
    request.num_steps += 1
    return "slow" not in request.words or request.num_steps > SLOW_STEPS


def load(config: EngineConfig) -> InstantEngine:
    """For ``TATKAL_ENGINE``; the artifact ``missing`` cannot be loaded, ``TATKAL_TEST_STEP_S`` is the pause.

    With ``TATKAL_TEST_VOICES`` each artifact has a voice of its own, which is its fingerprint too.
    """
    if config.artifact == Path("missing"):
        raise FileNotFoundError("artifact 'missing' is not there")
    voice = config.artifact.name if os.environ.get("TATKAL_TEST_VOICES") else ""
    return InstantEngine(
        step_s=float(os.environ.get("TATKAL_TEST_STEP_S", "0")),
        max_requests=config.max_num_seqs,
        fingerprint=voice or os.environ.get("TATKAL_TEST_FINGERPRINT", "instant"),
        voice=voice,
    )
