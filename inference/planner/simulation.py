"""The load of ``queueing`` played step by step: iteration-level batching on replicas that pull from one queue.

Nothing is approximated but the time of a step, which is the roofline's. It is slower than the formula and checks it.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from inference.planner.queueing import Load
from inference.planner.roofline import Roofline, Work

_WARM_UP = 0.1


@dataclass(frozen=True, slots=True)
class Simulated:
    """What happened to the requests after the warm-up."""

    mean_ttft_s: float
    ttft_s: float
    mean_tpot_s: float
    mean_batch: float


@dataclass(slots=True)
class _Request:
    arrived_at: float
    left: int
    first_at: float = 0.0
    ended_at: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True)
class _Replica:
    running: list[_Request] = field(default_factory=list)
    busy_s: float = 0.0
    batch_s: float = 0.0


def simulate(
    load: Load,
    roofline: Roofline,
    *,
    slots: int,
    replicas: int,
    num_requests: int = 20_000,
    seed: int = 0,
) -> Simulated:
    """Play ``num_requests`` requests; the first tenth of them warms up and is not counted."""
    requests = _arrivals(load, num_requests, random.Random(seed))  # noqa: S311 (no secret)
    waiting = deque(requests)
    fleet = [_Replica() for _ in range(replicas)]
    events = [(requests[0].arrived_at, index) for index in range(replicas)]
    heapq.heapify(events)
    while events:
        now, index = heapq.heappop(events)
        replica = fleet[index]
        while waiting and waiting[0].arrived_at <= now and len(replica.running) < slots:
            replica.running.append(waiting.popleft())
        if replica.running:
            heapq.heappush(events, (_step(replica, now, load, roofline), index))
        elif waiting:
            heapq.heappush(events, (max(waiting[0].arrived_at, now), index))
    return _summarize(requests[int(_WARM_UP * num_requests) :], fleet, load.quantile)


def _arrivals(load: Load, num_requests: int, noise: random.Random) -> list[_Request]:
    now, requests = 0.0, []
    for _ in range(num_requests):
        now += noise.expovariate(load.rate)
        requests.append(_Request(now, _length(load, noise)))
    return requests


def _length(load: Load, noise: random.Random) -> int:
    if load.output_cv2 == 0:
        return load.output_tokens
    shape = 1 / load.output_cv2
    return max(round(noise.gammavariate(shape, load.output_tokens / shape)), 1)


def _step(replica: _Replica, now: float, load: Load, roofline: Roofline) -> float:
    """One step of all that run, whole prompts of the new ones included; when it ends."""
    fresh = [each for each in replica.running if not each.num_tokens]
    decoding = len(replica.running) - len(fresh)
    ended_at = now + roofline.time_s(_work(decoding, len(fresh), load, roofline))
    for request in fresh:
        request.first_at = ended_at
    for request in replica.running:
        request.num_tokens += 1
        request.left -= 1
        request.ended_at = ended_at
    replica.busy_s += ended_at - now
    replica.batch_s += len(replica.running) * (ended_at - now)
    replica.running = [each for each in replica.running if each.left > 0]
    return ended_at


def _work(decoding: int, fresh: int, load: Load, roofline: Roofline) -> Work:
    """Weights are read once, whatever the step does with them."""
    decode = roofline.decode_work(decoding, load.mean_context)
    prefill = roofline.prefill_work(load.prompt_tokens)
    prompt_bytes = prefill.num_bytes - roofline.streamed_bytes
    return Work(decode.flops + fresh * prefill.flops, decode.num_bytes + fresh * prompt_bytes)


def _summarize(requests: list[_Request], fleet: list[_Replica], quantile: float) -> Simulated:
    firsts = sorted(each.first_at - each.arrived_at for each in requests)
    later = [
        (each.ended_at - each.first_at) / (each.num_tokens - 1)
        for each in requests
        if each.num_tokens > 1
    ]
    return Simulated(
        mean_ttft_s=sum(firsts) / len(firsts),
        ttft_s=firsts[int(quantile * (len(firsts) - 1))],
        mean_tpot_s=sum(later) / len(later) if later else 0.0,
        mean_batch=sum(each.batch_s for each in fleet) / sum(each.busy_s for each in fleet),
    )
