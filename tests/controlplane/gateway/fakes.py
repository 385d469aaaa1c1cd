"""A client to the engines that answers from a script, for faults that a real engine does not make on demand."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from controlplane.access.cache import KeyRecord, digest_key
from inference.client import Placement, UnknownEndpoint
from inference.protocol import (
    Answer,
    Failure,
    FeedbackRecord,
    Finished,
    FinishReason,
    GenerateRequest,
    RequestRecord,
    TokenRow,
)

ENDPOINT = "smollm2"
VERSION = "smollm2-135m-instruct/1"
KEY = "sk-tatkal-tests1-" + "k" * 43
SCOPED_KEY = "sk-tatkal-scoped1-" + "s" * 43
REVOKED_KEY = "sk-tatkal-revoked1-" + "r" * 43
HANG = None
"""A step of a script at which no row ever comes."""

Step = Sequence[TokenRow] | float | None


def text_row(seq: int, text: str) -> TokenRow:
    """One token that is not the last."""
    return TokenRow("r", 1, seq, text)


def last_row(
    seq: int,
    text: str = "",
    *,
    reason: FinishReason = FinishReason.STOP,
    prompt_tokens: int = 7,
    completion_tokens: int = 3,
) -> TokenRow:
    """The token that ends an answer; its counts are the engine's, and not the number of rows."""
    return TokenRow(
        "r",
        1,
        seq,
        text,
        finish=Finished(reason, prompt_tokens, completion_tokens, 0.001, 0.002, 0.003),
    )


def failure_row(seq: int, failure: Failure) -> TokenRow:
    """The row that ends a request with an error."""
    return TokenRow("r", 1, seq, "", failure=failure)


HELLO: list[Step] = [[text_row(0, "Hel")], [text_row(1, "lo")], [last_row(2, "!")]]


class FakeClient:
    """The shape of ``inference.client.Client``; used from the server's thread, looked at from the test's."""

    def __init__(self) -> None:
        self.script: list[Step] = HELLO
        self.refusals: list[Exception] = []
        self.read_error: Exception | None = None
        self.store_texts = False
        self.requests: list[GenerateRequest] = []
        self.sticky_keys: list[str] = []
        self.records: list[Any] = []  # RequestRecord or FeedbackRecord
        self.kept_for: tuple[str, ...] = ()
        self.answers: list[Answer] = []
        self._recorded = threading.Condition()
        self.left_at: list[float] = []
        self.left = threading.Event()
        self.is_connected = True
        self.num_dropped_records = 0
        self.num_dropped_answers = 0
        self.names = [ENDPOINT, "other"]
        self.keys = {
            "tests1": KeyRecord(digest_key(KEY), "tests"),
            "scoped1": KeyRecord(digest_key(SCOPED_KEY), "scoped", endpoints=("other",)),
            "revoked1": KeyRecord(digest_key(REVOKED_KEY), "revoked", revoked=True),
        }

    async def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to disconnect from."""

    async def endpoints(self) -> list[str]:
        """The names in the script, or the error in it."""
        if self.read_error is not None:
            raise self.read_error
        return list(self.names)

    async def ready_endpoints(self) -> list[str]:
        """As ``endpoints``: all are ready."""
        return await self.endpoints()

    async def read_key(self, key_id: str) -> str | None:
        """The published record, or the error in the script."""
        if self.read_error is not None:
            raise self.read_error
        record = self.keys.get(key_id)
        return record.to_json() if record else None

    def stream(self, request: GenerateRequest, sticky_key: str) -> FakeStream:
        """A stream that plays the script."""
        self.requests.append(request)
        self.sticky_keys.append(sticky_key)
        return FakeStream(self, request)

    def keep(self, answer: Answer) -> None:
        """Keep the half for the test."""
        self.answers.append(answer)

    def record(self, record: RequestRecord | FeedbackRecord) -> None:
        """Keep the record for the test."""
        with self._recorded:
            self.records.append(record)
            self._recorded.notify_all()

    def wait_for_records(self, count: int = 1) -> list[Any]:
        """The records, once there are ``count``; a record is written after its reply has gone out."""
        with self._recorded:
            assert self._recorded.wait_for(lambda: len(self.records) >= count, timeout=5)
        return self.records


class FakeStream:
    """Plays a script: rows, seconds to wait, or nothing for ever."""

    def __init__(self, client: FakeClient, request: GenerateRequest) -> None:
        self._client = client
        self._request = request
        self._steps = list(client.script)
        self._is_over = False
        self._wake_at = 0.0
        self.placement = Placement(
            *(VERSION, 42, "live", "0-1", request.deadline_s, client.store_texts),
            rollout="r0" if client.kept_for else "",
            kept_for=client.kept_for,
        )
        self.fingerprint = "fp"

    async def __aenter__(self) -> Self:
        if self._client.refusals:
            raise self._client.refusals.pop(0)
        if self._request.endpoint not in self._client.names:
            raise UnknownEndpoint(self._request.endpoint)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_over:
            self._client.left_at.append(time.monotonic())
            self._client.left.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenRow]:
        while self._steps and isinstance(step := self._steps[0], float):
            # A wait that was cut short goes on where it was, as it does in the real stream.
            self._wake_at = self._wake_at or time.monotonic() + step
            await asyncio.sleep(self._wake_at - time.monotonic())
            self._steps.pop(0)
            self._wake_at = 0.0
        if not self._steps:
            raise StopAsyncIteration
        rows = self._steps[0]
        if rows is HANG or isinstance(rows, float):
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        self._steps.pop(0)
        self._is_over = rows[-1].is_last
        return list(rows)
