"""Copies of requests and the halves of pairs that come of them: what slots, and what compares, ask of Redis."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inference.protocol import COPY_RUN_S, COPY_WAIT_S, Answer, GenerateRequest, QueueEntry, copy_id
from inference.queue.connection import Connection
from inference.queue.lanes import Delivery, Lane
from inference.queue.link import translated

logger = logging.getLogger(__name__)

ANSWERS_KEPT = 4_000
ANSWERS_TTL_S = (
    900  # longer than a copy may wait and run; texts that may not be stored live no longer
)
SKIPS_KEPT_S = 30 * 86_400
PAGE = 200


@dataclass(frozen=True, slots=True)
class TakenCopy:
    """A copy in a slot's hands; no ``body`` if it was given up meanwhile."""

    delivery: Delivery
    body: str | None


@dataclass(frozen=True, slots=True)
class FinishedCopy:
    """A copy with the half of the pair that came of it."""

    delivery: Delivery
    answer: Answer


@dataclass(frozen=True, slots=True)
class Half:
    """A half of a pair with the id to delete it by."""

    entry_id: str
    answer: Answer


class CopyCalls(Connection):
    """The calls around copies."""

    # ------------------------------------------------------------------------------------------------------ slots

    def take_copies(
        self, lane: Lane, consumer: str, count: int, *, held: Sequence[str] = (), is_idle: bool
    ) -> tuple[list[TakenCopy], set[str]]:
        """Up to ``count`` copies while no request waits, and which entries of ``held`` are not the consumer's any more.

        A slot that ``is_idle`` is given one of a slot that died, and then nothing beside it.
        """
        keys = [lane.key("q"), lane.key("low")]
        with translated():
            rows, lost = self._lua["take_copies"](keys, [consumer, count, int(is_idle), *held])
        taken = [
            TakenCopy(Delivery(entry_id, deliveries, _entry(flat)), body)
            for entry_id, deliveries, flat, body in rows
        ]
        return taken, set(lost)

    def answer_copies(self, lane: Lane, consumer: str, finished: Sequence[FinishedCopy]) -> int:
        """Write the halves and end the copies; what the consumer does not own any more is passed over."""
        parts = [
            part
            for each in finished
            for part in (
                *(each.delivery.entry_id, each.delivery.entry.id, each.answer.rollout),
                *(each.answer.arm, each.answer.to_json(), each.answer.dropped),
            )
        ]
        limits = (ANSWERS_KEPT, ANSWERS_TTL_S * 1000)
        with translated():
            keys = [lane.key("low"), "answers"]
            args: list[str | int] = [consumer, lane.endpoint, lane.version, *limits, *parts]
            return int(self._lua["answer"](keys, args))

    # -------------------------------------------------------------------------------------------- control plane

    def enqueue_copy(
        self, request: GenerateRequest, version: str, *, arm: str, rollout: str = ""
    ) -> str:
        """Have ``version`` answer, or score, a request that has ended; once per request and arm.

        Returns:
            ``queued``, ``repeated``, or the reason why there is no copy, which was counted.
        """
        name = copy_id(request.id, arm)
        run_ms = int(min(request.deadline_s, COPY_RUN_S) * 1000)
        kept_ms = int(COPY_WAIT_S * 1000) + run_ms + ANSWERS_TTL_S * 1000
        keys = [f"route:{request.endpoint}", f"made:{name}"]
        names = (request.endpoint, version, request.id, arm, rollout)
        with translated():
            return str(self._lua["copy"](keys, [*names, request.to_json(), run_ms, kept_ms]))

    def give_up_copy(self, request_id: str, arm: str) -> str:
        """Delete a copy that nobody waits for any longer: ``dispatched``, ``waiting`` or ``gone``, as it was found."""
        name = copy_id(request_id, arm)
        with translated():
            return str(self._lua["give_up"]([f"req:{name}"], [name]))

    def read_answers(self) -> Iterator[Half]:
        """Every half that waits for its other one, the oldest first; what is older than it may be is deleted."""
        with translated():
            seconds, micros = self._redis.time()
            oldest_ms = seconds * 1000 + micros // 1000 - ANSWERS_TTL_S * 1000
            self._redis.xtrim("answers", minid=oldest_ms, approximate=False)
        start = "-"
        while True:
            with translated():
                rows = self._redis.xrange("answers", start, "+", PAGE)
            for entry_id, fields in rows:
                if (half := self._parse_half(entry_id, fields)) is not None:
                    yield half
            if len(rows) < PAGE:
                return
            start = f"({rows[-1][0]}"

    def delete_answers(self, entry_ids: Sequence[str]) -> None:
        """The halves have been compared."""
        if entry_ids:
            with translated():
                self._redis.xdel("answers", *entry_ids)

    def count_skip(self, endpoint: str, rollout: str, arm: str, reason: str) -> None:
        """Count a copy that tells nothing."""
        with translated(), self._redis.pipeline(transaction=True) as pipe:
            skips = f"skips:{endpoint}:{rollout}"
            pipe.hincrby(skips, f"{arm}.{reason}", 1).expire(skips, SKIPS_KEPT_S).execute()

    def read_skips(self, endpoint: str, rollout: str) -> dict[str, dict[str, int]]:
        """Of each arm, how many copies were not made, or dropped before they ran, by reason."""
        with translated():
            counts = self._redis.hgetall(f"skips:{endpoint}:{rollout}")
        skips: dict[str, dict[str, int]] = {}
        for name, count in sorted(counts.items()):
            arm, _, reason = name.partition(".")
            skips.setdefault(arm, {})[reason] = int(count)
        return skips

    def _parse_half(self, entry_id: str, fields: dict[str, str]) -> Half | None:
        try:
            return Half(entry_id, Answer.from_json(fields["answer"]))
        except (KeyError, TypeError, ValueError):  # of a release we do not know
            logger.exception("answer dropped entry_id=%s", entry_id)
            self.delete_answers([entry_id])
            return None


def _entry(flat: list[str]) -> QueueEntry:
    return QueueEntry.from_fields(dict(zip(flat[::2], flat[1::2], strict=True)))
