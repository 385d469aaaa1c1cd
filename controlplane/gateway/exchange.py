"""One request between an application and the engines: placed, read row by row, recorded however it ends."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from http import HTTPStatus

from controlplane.errors import DomainError
from controlplane.gateway.choices import Choices, Delta
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.parameters import Call, sticky_key
from inference.client import (
    Client,
    NoReadySlot,
    Placement,
    QueueFull,
    QueueUnavailable,
    Stream,
    UnknownEndpoint,
)
from inference.protocol import LIVE, Answer, Failure, Finished, RequestRecord, TokenRow

UNAVAILABLE_RETRY_S = 5
CLIENT_CLOSED_REQUEST = 499
CHOICES_APART = "\n\n"  # between the texts of several choices in a record

SHUTTING_DOWN = Failure(
    code="server_shutting_down",
    message="This gateway is shutting down; send the request again.",
    status=HTTPStatus.SERVICE_UNAVAILABLE,
    retry_after_s=1,
)
STREAM_BROKEN = Failure(
    code="stream_interrupted",
    message="The answer ended without a last token.",
    status=HTTPStatus.BAD_GATEWAY,
)


class RequestFailed(DomainError):
    """A request that ends with a visible error instead of an answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, retry_after_s=failure.retry_after_s)
        self.code = failure.code
        self.status = failure.status
        self.failure = failure


class Exchange:
    """``open``, ``read`` until a delta is finished, ``close``.

    ``close`` must be called however the request ends; it cancels what the engine still computes, and writes one
    ``RequestRecord``. Times are taken from ``started``, in seconds of ``time.monotonic``.
    """

    def __init__(
        self, client: Client, metrics: GatewayMetrics, call: Call, *, started: float
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._call = call
        self._started = started
        self._context = AsyncExitStack()
        self._stores_texts = False
        self._is_kept = False
        self._stream: Stream | None = None
        self._waiting: asyncio.Timeout | None = None
        self._is_interrupted = False
        self._is_closed = False
        request = call.request
        self._choices = Choices(request.n, with_logprobs=request.sampling.logprobs is not None)
        self._texts: list[list[str]] = [[] for _ in range(request.n)]
        self._first_token_s: float | None = None
        self._rows_at = started
        self._finished: Finished | None = None
        self._failure: Failure | None = None

    @property
    def placement(self) -> Placement | None:
        """Which version answers; None until the request is placed."""
        return self._stream.placement if self._stream is not None else None

    @property
    def is_known_endpoint(self) -> bool:
        """Whether the request named an endpoint that has a route, as far as is known."""
        return self.placement is not None or (
            self._failure is not None and self._failure.code in ("queue_full", "no_ready_slot")
        )

    async def open(self) -> None:
        """Place the request in a version's queue.

        Raises:
            RequestFailed: no such endpoint, no ready slot, a full queue, or no Redis.
        """
        request = self._call.request
        try:
            self._stream = await self._context.enter_async_context(
                self._client.stream(request, sticky_key(request))
            )
        except UnknownEndpoint as error:
            raise self._fail(unknown_model(request.endpoint)) from error
        except QueueFull as error:
            raise self._fail(_queue_full(request.endpoint, error.retry_after_s)) from error
        except NoReadySlot as error:
            raise self._fail(_no_ready_slot(request.endpoint, error.retry_after_s)) from error
        except QueueUnavailable as error:
            raise self._fail(queue_unavailable()) from error
        self._stores_texts = self._stream.placement.store_texts
        self._is_kept = bool(self._stream.placement.kept_for)

    async def read(self, wait_s: float | None = None) -> Delta | None:
        """The next piece of the answer, or None when none came within ``wait_s``.

        Without ``wait_s`` the client's own deadline bounds the wait.

        Raises:
            RequestFailed: the engine, the data path or the end of this process ended the request.
        """
        if self._stream is None:
            raise RuntimeError("read() before open()")
        if self._is_interrupted:
            raise self._fail(SHUTTING_DOWN)
        try:
            async with asyncio.timeout(wait_s) as self._waiting:
                rows = await anext(self._stream)
        except TimeoutError:
            if self._is_interrupted:
                raise self._fail(SHUTTING_DOWN) from None
            return None
        except StopAsyncIteration:
            raise self._fail(STREAM_BROKEN) from None
        finally:
            self._waiting = None
        return self._take(rows)

    def interrupt(self) -> None:
        """End the request with a visible error at its next, or present, wait for rows."""
        self._is_interrupted = True
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Leave the stream, which cancels an unfinished request, and record the end. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._context.aclose()
        finally:
            self._record()

    def _take(self, rows: list[TokenRow]) -> Delta:
        last = rows[-1]
        if last.failure is not None:
            raise self._fail(last.failure)
        self._count_time(rows)
        delta = self._choices.take(rows)
        if self._stores_texts or self._is_kept:
            for piece in delta.pieces:
                self._texts[piece.index].append(piece.text)
        self._finished = delta.finished
        return delta

    def _count_time(self, rows: list[TokenRow]) -> None:
        """When the first token came, or how far apart the tokens of a choice came."""
        now = time.monotonic()
        if self._first_token_s is None:
            self._first_token_s = now - self._started
        elif self.placement is not None:
            gap_s = (now - self._rows_at) * len({row.choice for row in rows}) / len(rows)
            self._metrics.count_gap(
                self._call.request.endpoint, self.placement.version, gap_s, len(rows)
            )
        self._rows_at = now

    def _fail(self, failure: Failure) -> RequestFailed:
        self._failure = failure
        return RequestFailed(failure)

    def _record(self) -> None:
        if self._failure is not None and self._failure.code == "model_not_found":
            return  # A name that a caller invented is no endpoint's traffic.
        outcome, status = self._outcome()
        request, placement, finished = self._call.request, self.placement, self._finished
        record = RequestRecord(
            id=request.id,
            key_id=request.key_id,
            endpoint=request.endpoint,
            version=placement.version if placement else "",
            generation=placement.generation if placement else 0,
            arm=placement.arm if placement else "",
            outcome=outcome,
            status=status,
            finish_reason=finished.reason if finished else "",
            streamed=self._call.stream,
            prompt_tokens=finished.prompt_tokens if finished else 0,
            completion_tokens=finished.completion_tokens if finished else 0,
            queue_s=finished.queue_s if finished else None,
            first_token_s=self._first_token_s,
            total_s=time.monotonic() - self._started,
            engine_s=finished.engine_s if finished else None,
            cached_tokens=finished.cached_tokens if finished else 0,
            finished_at=time.time(),
            user=request.user or "",
            tags=request.metadata,
            prompt=_prompt_text(self._call) if self._stores_texts else None,
            completion=self._completion_text() if self._stores_texts else None,
        )
        self._client.record(record)
        if self.is_known_endpoint:
            self._metrics.count(record)
        if placement is not None and self._is_kept:
            self._client.keep(self._half(record, placement))

    def _completion_text(self) -> str:
        return CHOICES_APART.join("".join(texts) for texts in self._texts)

    def _half(self, record: RequestRecord, placement: Placement) -> Answer:
        """The incumbent's half of a pair, with its texts whether the endpoint stores them or not: it lives for minutes."""
        request = replace(self._call.request, deadline_s=placement.deadline_s)
        return Answer(
            copy_of=record.id,
            arm=LIVE,
            endpoint=record.endpoint,
            version=record.version,
            generation=record.generation,
            rollout=placement.rollout,
            fingerprint=self._stream.fingerprint if self._stream else "",
            outcome=record.outcome,
            at=record.finished_at,
            text=self._completion_text(),
            finish_reason=record.finish_reason,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            engine_s=self._finished.engine_s if self._finished else 0.0,
            total_s=record.total_s,
            request=request.to_json(),
            awaits=placement.kept_for,
            store_texts=self._stores_texts,
        )

    def _outcome(self) -> tuple[str, int]:
        if self._failure is not None:
            return self._failure.code, self._failure.status
        if self._finished is not None:
            return "ok", HTTPStatus.OK
        return "cancelled", CLIENT_CLOSED_REQUEST


def unknown_model(name: str) -> Failure:
    """No endpoint of that name."""
    return Failure(
        code="model_not_found",
        message=f"The model {json.dumps(name)} does not exist.",
        status=HTTPStatus.NOT_FOUND,
        param="model",
    )


def endpoint_not_allowed(name: str) -> Failure:
    """The key is limited to other endpoints; whether this one exists is not told."""
    return Failure(
        code="endpoint_not_allowed",
        message=f"This API key may not use the model {json.dumps(name)}. Ask for a key that may; GET /v1/models lists "
        "what this one may use.",
        status=HTTPStatus.FORBIDDEN,
        param="model",
    )


def queue_unavailable() -> Failure:
    """Redis does not answer."""
    return Failure(
        code="queue_unavailable",
        message="The request queue cannot be reached; try again.",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        retry_after_s=UNAVAILABLE_RETRY_S,
    )


def _queue_full(endpoint: str, retry_after_s: int) -> Failure:
    return Failure(
        code="queue_full",
        message=f"The queue of {json.dumps(endpoint)} is full; try again in {retry_after_s} s.",
        status=HTTPStatus.TOO_MANY_REQUESTS,
        retry_after_s=retry_after_s,
    )


def _no_ready_slot(endpoint: str, retry_after_s: int) -> Failure:
    return Failure(
        code="no_ready_slot",
        message=f"No engine is ready for {json.dumps(endpoint)}; try again in {retry_after_s} s.",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        retry_after_s=retry_after_s,
    )


def _prompt_text(call: Call) -> str:
    """The prompt as text: itself, or JSON of its messages or token ids."""
    request = call.request
    if request.prompt is not None:
        return request.prompt
    if request.messages is None:
        return json.dumps(request.prompt_token_ids)
    turns = [{"role": turn.role, "content": turn.content} for turn in request.messages]
    return json.dumps(turns, ensure_ascii=False)
