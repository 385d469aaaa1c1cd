"""How many replicas a rate of requests needs: all of them pull from one queue, each holds so many sequences at once.

The model is M/G/c with a service rate that depends on how many are served: Poisson arrivals, c = replicas times slots,
and a request that holds its slot for its prompt and then a step for every token, which are longer in a larger batch. So
the number in service is a birth-death chain, beyond c the wait has an exponential tail, and how answers differ in length
enters by the Allen-Cunneen factor. Prompts are computed one after the other, a queue of their own (M/D/1).
Source: Kleinrock (1975), "Queueing Systems, Volume 1", sections 3.1 (birth-death) and 5.6 (M/D/1 by Pollaczek-Khinchin);
Allen (1990), "Probability, Statistics, and Queueing Theory", 2nd edition, section 5.3.6 (M/G/c).

``simulation`` plays the same load step by step, and a test compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from inference.planner.roofline import Roofline, Work
from inference.planner.shape import InvalidPlan, check_range

MAX_REPLICAS = 4096
MODEL = (
    "M/G/c, one queue for all replicas, service rate by batch (birth-death chain, Allen-Cunneen factor), prompts as M/D/1, "
    "time of a step from the roofline"
)
MAX_IN_SERVICE = 100_000
"""Sequences at once; more are planned for a part of their rate, since replicas rise with it."""

_LARGE = 1e250
_NEGLIGIBLE = 1e-18


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at random, ``rate`` a second, and what they may take.

    ``output_cv2`` is the squared coefficient of variation of the answers' lengths: 0 all equal, 1 geometric. The limit
    of the first token holds for the share ``quantile`` of requests, that of the later ones on average.
    """

    rate: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    output_cv2: float = 1.0
    quantile: float = 0.99

    def __post_init__(self) -> None:
        check_range("rate", self.rate, low=1e-6, high=1e6)
        check_range("prompt_tokens", self.prompt_tokens, low=1, high=10**7)
        check_range("output_tokens", self.output_tokens, low=1, high=10**7)
        check_range("ttft_s", self.ttft_s, low=1e-6, high=1e6)
        check_range("tpot_s", self.tpot_s, low=1e-6, high=1e6)
        check_range("output_cv2", self.output_cv2, low=0, high=100)

    @property
    def mean_context(self) -> float:
        """Tokens behind a sequence while it decodes, on average."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Service:
    """What so many replicas make of a load. ``batch`` is how many sequences one of them runs on average."""

    replicas: int
    slots: int
    ttft_s: float
    tpot_s: float
    batch: float
    utilisation: float
    waiting_share: float

    def meets(self, load: Load) -> bool:
        """Whether both limits hold."""
        return self.ttft_s <= load.ttft_s and self.tpot_s <= load.tpot_s


def serve(load: Load, roofline: Roofline, *, slots: int, replicas: int) -> Service | None:
    """What ``replicas`` with ``slots`` sequences each make of ``load``; None if the queue grows without end.

    Raises:
        InvalidPlan: more than ``MAX_IN_SERVICE`` sequences are in service at once.
    """
    pace = _Pace.of(load, roofline, load.rate / replicas)
    servers = replicas * slots
    if not pace.is_finite(slots):
        return None
    holding_s, token_s = pace.times(slots)
    utilisation = load.rate * holding_s / servers
    if utilisation >= 1:
        return None
    chain = _balance(pace, servers=servers, replicas=replicas)
    # Beside the sequences that do run. All slots together may hold many times more, and would take as much longer.
    prompt_s = pace.prompt_s(chain.batch)
    prompt_share = pace.rate * prompt_s
    if prompt_share >= 1:
        return None
    variation = load.output_cv2 * (load.output_tokens * token_s / holding_s) ** 2
    slot_wait_s = (1 + variation) / 2 * holding_s / (servers * (1 - utilisation))
    prompt_wait_s = prompt_s / (2 * (1 - prompt_share))
    return Service(
        replicas=replicas,
        slots=slots,
        ttft_s=_tail(chain.waiting_share, slot_wait_s, load.quantile)
        + _tail(prompt_share, prompt_wait_s, load.quantile)
        + pace.step_s(chain.batch)
        + prompt_s,
        tpot_s=chain.token_s,
        batch=chain.batch,
        utilisation=utilisation,
        waiting_share=chain.waiting_share,
    )


def plan_replicas(load: Load, roofline: Roofline, *, slots: int) -> Service:
    """The fewest replicas that meet the limits of ``load``.

    Raises:
        InvalidPlan: no number of them does; the message says which limit is out of reach, and by how much.
    """
    if slots < 1:
        raise InvalidPlan(
            "context", "Not one sequence fits, so no number of replicas helps; shorten the context."
        )
    _check_reachable(load, roofline)
    low, high = 0, 1
    while (found := _meeting(load, roofline, slots, high)) is None:
        low, high = high, 2 * high
        if high > MAX_REPLICAS:
            raise InvalidPlan(
                "rate",
                f"rate={load.rate:g} needs more than {MAX_REPLICAS} replicas; loosen a limit.",
            )
    while high - low > 1:
        middle = (low + high) // 2
        better = _meeting(load, roofline, slots, middle)
        low, high, found = (middle, high, found) if better is None else (low, middle, better)
    return found


def _meeting(load: Load, roofline: Roofline, slots: int, replicas: int) -> Service | None:
    service = serve(load, roofline, slots=slots, replicas=replicas)
    return service if service is not None and service.meets(load) else None


@dataclass(frozen=True, slots=True)
class _Pace:
    """Times of one replica that gets ``rate`` requests a second and runs a given batch.

    ``base`` is what a step does whatever its batch, ``sequence`` what each sequence adds, ``prompt`` what a prompt does.
    """

    load: Load
    roofline: Roofline
    rate: float
    base: Work
    sequence: Work
    prompt: Work

    @classmethod
    def of(cls, load: Load, roofline: Roofline, rate: float) -> _Pace:
        """Reckoned once, since a step is asked for at every number of sequences."""
        base, one = (roofline.decode_work(batch, load.mean_context) for batch in (0, 1))
        prefill = roofline.prefill_work(load.prompt_tokens)
        return cls(
            load,
            roofline,
            rate,
            base=base,
            sequence=Work(one.flops - base.flops, one.num_bytes - base.num_bytes),
            prompt=Work(prefill.flops, prefill.num_bytes - roofline.streamed_bytes),
        )

    def step_s(self, batch: float) -> float:
        """A step that only decodes."""
        return self._time_s(max(batch, 1.0), 0)

    def prompt_s(self, batch: float) -> float:
        """A step that computes a prompt beside the others; weights are read once for all."""
        return self._time_s(batch, 1)

    def is_finite(self, batch: float) -> bool:
        """Whether prompts leave any time for later tokens."""
        return self.rate * (self.prompt_s(batch) - self.step_s(batch)) < 1

    def times(self, batch: float) -> tuple[float, float]:
        """How long a request holds its slot, and from one token to the next, with the prompts that come in between."""
        prompt_s, step_s = self.prompt_s(batch), self.step_s(batch)
        token_s = step_s / (1 - self.rate * (prompt_s - step_s))
        return prompt_s + self.load.output_tokens * token_s, token_s

    def _time_s(self, batch: float, num_prompts: int) -> float:
        base, sequence, prompt = self.base, self.sequence, self.prompt
        return self.roofline.time_s(
            Work(
                base.flops + batch * sequence.flops + num_prompts * prompt.flops,
                base.num_bytes + batch * sequence.num_bytes + num_prompts * prompt.num_bytes,
            )
        )


@dataclass(frozen=True, slots=True)
class _Chain:
    """The balance of requests that come and go: mean batch, mean time of a token, share that finds no slot."""

    batch: float
    token_s: float
    waiting_share: float


def _balance(pace: _Pace, *, servers: int, replicas: int) -> _Chain:
    """The birth-death chain of the number in service, up to ``servers`` and, with a constant rate, beyond.

    Where nobody ever needs that many, it ends at the number that is as good as never reached.
    """
    weight, total, in_service, token_time = 1.0, 1.0, 0.0, 0.0
    ratio = 0.0
    for number in range(1, servers + 1):
        holding_s, token_s = pace.times(number / replicas)
        ratio = pace.load.rate * holding_s / number
        weight *= ratio
        if number == servers:
            weight /= 1 - ratio  # this state and all beyond it
        total += weight
        in_service += weight * number
        token_time += weight * number * token_s
        if ratio < 1 and weight < _NEGLIGIBLE * total:
            break
        if number == MAX_IN_SERVICE:
            raise InvalidPlan(
                "rate",
                f"rate={pace.load.rate:g} keeps more than {MAX_IN_SERVICE:,} sequences in service at once; plan for a "
                "part of it, replicas rise with the rate.",
            )
        if total > _LARGE:
            weight, total = weight / _LARGE, total / _LARGE
            in_service, token_time = in_service / _LARGE, token_time / _LARGE
    return _Chain(in_service / total / replicas, token_time / in_service, weight / total)


def _tail(waiting_share: float, mean_wait_s: float, quantile: float) -> float:
    """The wait that the share ``quantile`` of requests stays below; those that wait do so for an exponential time."""
    beyond = 1 - quantile
    return mean_wait_s * math.log(waiting_share / beyond) if waiting_share > beyond else 0.0


def _check_reachable(load: Load, roofline: Roofline) -> None:
    pace = _Pace.of(load, roofline, 0.0)
    step_s = pace.step_s(1)
    first_s = pace.prompt_s(0) + step_s
    for name, limit, least in (
        ("tpot_s", load.tpot_s, step_s),
        ("ttft_s", load.ttft_s, first_s),
    ):
        if limit < least:
            raise InvalidPlan(
                name,
                f"{name}={limit:g} is below {least:.4g} s, what a request that is alone takes here: more replicas do "
                "not help, a faster device or narrower weights do.",
            )
