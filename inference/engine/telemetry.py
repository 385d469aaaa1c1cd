"""What each step cost and who pays for it: tokens, bytes, operations and seconds, counted as steps are computed.

Bytes and operations are computed from the shape of the model, not measured: a step reads every weight once, for each of
its sequences the keys and values of all positions up to the last computed one, and writes those of the new positions.
Divided by the time that the steps took, they say how much of the machine was used (MBU, MFU).

One thread counts; any thread may read. Whatever is read is replaced as a whole, never changed in place.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from inference.config import ModelConfig
from inference.engine.choices import sequence_id
from inference.engine.plan import PlannedRow
from inference.engine.request import StepOutput
from inference.planner.hardware import Device
from inference.planner.shape import ModelShape

WINDOW_S = 10.0
"""What "now" means in a report."""

RIDGE = 20.0
"""Operations that take as long as one byte, where the machine was not calibrated: one core with AVX-512 and DDR memory.

It only decides how a step is shared out between those that read much and those that compute much.
"""

STEP_TOKENS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
STEP_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_MARK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one loaded model moves and computes, in bytes and floating-point operations.

    ``flops_per_token`` are those of the layers' matrices, ``flops_per_logits`` those of the output matrix, which is
    computed where a token is chosen, ``flops_per_pair`` those of one query that looks at one key, over all layers.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    flops_per_logits: float
    flops_per_pair: float

    @classmethod
    def of(cls, model: ModelConfig, shape: ModelShape, *, kv_bytes_per_token: float) -> ModelCost:
        """What ``Roofline.token_flops`` counts per token, the output matrix apart; ``shape`` has the real bytes."""
        flops_per_logits = 2 * model.vocab_size * model.hidden_size
        return cls(
            weight_bytes=shape.weight_bytes * shape.computed_params / shape.params,
            kv_bytes_per_token=kv_bytes_per_token,
            flops_per_token=2 * shape.computed_params - flops_per_logits,
            flops_per_logits=flops_per_logits,
            flops_per_pair=4 * shape.num_layers * shape.attention_width,
        )


class Totals(NamedTuple):
    """Everything since the engine was loaded; no number ever falls.

    ``num_generated`` are tokens that were chosen, ``num_decode_tokens`` positions computed one at a time after the
    prompt, ``num_prefill_tokens`` all others, also those of a preempted sequence that is computed again. ``unbilled_s``
    are engine seconds of requests that ended without an answer.
    """

    num_steps: int = 0
    busy_s: float = 0.0
    num_rows: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_generated: int = 0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    flops: float = 0.0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    unbilled_s: float = 0.0

    @property
    def bytes_moved(self) -> float:
        """Read and written."""
        return self.bytes_read + self.bytes_written


class _Bill:
    """What an unfinished request owes so far."""

    __slots__ = ("num_cached_tokens", "seconds")

    def __init__(self) -> None:
        self.num_cached_tokens = 0
        self.seconds = 0.0


def share_out(rows: Sequence[PlannedRow], cost: ModelCost, ridge: float) -> list[float]:
    """The share of each row in its step; together they are 1.

    A row's work is the time that its bytes and its operations would take one after the other, in units of one operation:
    ``ridge`` times its bytes, plus its operations. Its bytes are the keys and values it reads and writes, and of the
    weights, which are read once for all, a part for each of its tokens. So whoever shares a step pays less than alone,
    a long context pays for what is read of it, and a prompt's tokens weigh as much as they compute.
    """
    num_tokens = sum(row.num_tokens for row in rows)
    kv_bytes = cost.kv_bytes_per_token
    per_token = ridge * (cost.weight_bytes / num_tokens + kv_bytes) + cost.flops_per_token
    per_key, per_pair, per_logits = ridge * kv_bytes, cost.flops_per_pair, cost.flops_per_logits
    works = []
    for row in rows:
        num, start = row.num_tokens, row.start
        work = per_token * num + per_key * (start + num) + per_pair * _count_pairs(start, num)
        works.append(work + per_logits * _count_logits(row))
    total = sum(works)
    return [work / total for work in works]


class Telemetry:
    """Counts the steps of one engine, and shares their time out among the requests.

    Its memory is bounded: sums, twenty-odd marks of them for the last seconds, and a bill per unfinished request.
    """

    def __init__(
        self,
        cost: ModelCost,
        *,
        weights: str = "bf16",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``weights`` is the format that the matrices are computed in, as the planner names it."""
        self._cost = cost
        self._weights = weights
        self._clock = clock
        self._machine: Device | None = None
        self._ridge = RIDGE
        self._bills: dict[str, _Bill] = {}
        self._counted_at = -WINDOW_S
        self._marks = deque([(clock(), Totals())], maxlen=2 + int(WINDOW_S / _MARK_EVERY_S))
        self.totals = Totals()
        self.step_tokens = [0] * (len(STEP_TOKENS_BUCKETS) + 1)
        self.step_seconds = [0] * (len(STEP_SECONDS_BUCKETS) + 1)

    def calibrate(self, machine: Device) -> None:
        """Compare with what this machine can do; from any thread, and again when it was measured anew."""
        self._machine = machine
        self._ridge = machine.ridge(self._weights)

    # ------------------------------------------------------------------------------------------ engine thread

    def bill(
        self, rows: Sequence[PlannedRow], outputs: list[StepOutput], seconds: float
    ) -> list[StepOutput]:
        """Count a step that took ``seconds``, and write on the last output of each answer what it owes."""
        self._charge(rows, seconds)
        self._count(rows, seconds)
        return [self._settle(output) if output.is_last else output for output in outputs]

    def forgive(self, request_id: str) -> None:
        """A request ends without an answer; an unknown one is fine."""
        bill = self._bills.pop(request_id, None)
        if bill is not None:
            self.totals = self.totals._replace(unbilled_s=self.totals.unbilled_s + bill.seconds)

    def _charge(self, rows: Sequence[PlannedRow], seconds: float) -> None:
        bills = self._bills
        for row, share in zip(rows, share_out(rows, self._cost, self._ridge), strict=True):
            bill = bills.get(row.request.id)
            if bill is None:
                bill = bills[row.request.id] = _Bill()
                self._count_prefix(row, bill)
            bill.seconds += share * seconds

    def _settle(self, output: StepOutput) -> StepOutput:
        name = sequence_id(output.request_id, output.choice)
        if output.failure is not None:
            self.forgive(name)
            return output
        bill = self._bills.pop(name, None) or _Bill()
        return replace(output, engine_s=bill.seconds, num_cached_tokens=bill.num_cached_tokens)

    def _count_prefix(self, row: PlannedRow, bill: _Bill) -> None:
        """Once for the prompt of a request, however many choices share it."""
        request, totals = row.request, self.totals
        if request.parent is None and row.start < request.num_prompt_tokens:
            bill.num_cached_tokens = request.num_cached_tokens
            self.totals = totals._replace(
                num_prefix_queries=totals.num_prefix_queries + request.num_prompt_tokens,
                num_prefix_hits=totals.num_prefix_hits + request.num_cached_tokens,
            )

    def _count(self, rows: Sequence[PlannedRow], seconds: float) -> None:
        cost, before = self._cost, self.totals
        num_tokens = num_keys = num_pairs = num_decodes = num_logits = num_chosen = 0
        for row in rows:
            num, start = row.num_tokens, row.start
            num_tokens += num
            num_keys += start + num
            num_pairs += _count_pairs(start, num)
            num_logits += _count_logits(row)
            num_chosen += row.samples and row.request.first_logit is None
            num_decodes += num == 1 and start >= row.request.num_prompt_tokens
        flops = cost.flops_per_token * num_tokens + cost.flops_per_pair * num_pairs
        self.totals = before._replace(
            num_steps=before.num_steps + 1,
            busy_s=before.busy_s + seconds,
            num_rows=before.num_rows + len(rows),
            num_prefill_tokens=before.num_prefill_tokens + num_tokens - num_decodes,
            num_decode_tokens=before.num_decode_tokens + num_decodes,
            num_generated=before.num_generated + num_chosen,
            bytes_read=before.bytes_read + cost.weight_bytes + cost.kv_bytes_per_token * num_keys,
            bytes_written=before.bytes_written + cost.kv_bytes_per_token * num_tokens,
            flops=before.flops + flops + cost.flops_per_logits * num_logits,
        )
        self.step_tokens[bisect_left(STEP_TOKENS_BUCKETS, num_tokens)] += 1
        self.step_seconds[bisect_left(STEP_SECONDS_BUCKETS, seconds)] += 1
        self._counted_at = self._clock()
        began_at = self._counted_at - seconds
        if began_at - self._marks[-1][0] >= _MARK_EVERY_S:
            self._marks.append((began_at, before))

    # --------------------------------------------------------------------------------------------- any thread

    def report(self) -> dict[str, float | None]:
        """The last ``WINDOW_S`` seconds, for people; None is what cannot be told.

        Rates of bytes and operations are over the time that the engine computed, so they say how well it computes;
        ``busy`` says for how much of the window it did, and tokens per second are over the whole of it.
        """
        now = self._clock()
        since, before = self._window_start(now)
        did = Totals._make(after - each for after, each in zip(self.totals, before, strict=True))
        if now - self._counted_at > WINDOW_S or not did.busy_s:
            did = Totals()
        bytes_per_s = _divide(did.bytes_moved, did.busy_s)
        flops_per_s = _divide(did.flops, did.busy_s)
        machine = self._machine
        return {
            "busy": _divide(did.busy_s, now - since) or 0.0,
            "batch_rows": _divide(did.num_rows, did.num_steps),
            "tokens_per_s": _divide(did.num_generated, now - since) or 0.0,
            "bytes_per_s": bytes_per_s,
            "flops_per_s": flops_per_s,
            "intensity": _divide(did.flops, did.bytes_moved),
            "mbu": _fraction(bytes_per_s, machine.bandwidth if machine else None),
            "mfu": _fraction(flops_per_s, machine.rate(self._weights) if machine else None),
            "prefix_hit_rate": _divide(did.num_prefix_hits, did.num_prefix_queries),
        }

    def _window_start(self, now: float) -> tuple[float, Totals]:
        """The first mark inside the window; while a single step takes longer than that, the last one."""
        marks = list(self._marks)  # one call into C, which no other thread interrupts
        return next((mark for mark in marks if mark[0] >= now - WINDOW_S), marks[-1])


def _count_pairs(start: int, num: int) -> int:
    """How many keys the queries at ``num`` positions from ``start`` look at: each at its own and all before."""
    return num * start + num * (num + 1) // 2


def _count_logits(row: PlannedRow) -> int:
    """For how many positions the output matrix is computed: one where a token is chosen, many where an answer is scored."""
    first = row.request.first_logit
    if first is None:
        return int(row.samples)
    return max(0, row.start + row.num_tokens - max(row.start, first))


def _divide(amount: float, by: float) -> float | None:
    return amount / by if by else None


def _fraction(rate: float | None, best: float | None) -> float | None:
    return None if rate is None or best is None else rate / best
