"""How long and how dear: the time of a step is what its slower side takes, bytes or multiplications.

Source: Williams, Waterman and Patterson (2009), "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", Commun. ACM 52(4), 65-76. FLOPs of a token: Kaplan et al. (2020), "Scaling Laws for Neural Language
Models", arXiv:2001.08361, section 2.1: 2N for the weights, and the attention over what came before.

These are bounds. Nothing is faster than its roof, unless a cache held a part of what counts as read from memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from inference.planner.hardware import Device
from inference.planner.memory import kv_bytes_per_token
from inference.planner.shape import BITS, ModelShape, bits_per_weight, weight_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does: multiplications and additions, and bytes between memory and processor."""

    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.num_bytes


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model in given formats on a device. ``group_size`` 0 leaves out the scales of integer weights."""

    device: Device
    shape: ModelShape
    weights: str
    kv: str
    group_size: int = 0

    @property
    def streamed_bytes(self) -> float:
        """Weights that every step reads: all but a lookup table."""
        total = weight_bytes(self.shape, self.weights, self.group_size)
        return total * self.shape.computed_params / self.shape.params

    @property
    def ridge(self) -> float:
        """FLOP per byte at which memory and arithmetic take equally long."""
        return self.device.ridge(self.weights)

    def decode_floor_s(self) -> float:
        """The shortest decode step: every weight is read once."""
        return self.streamed_bytes / self.device.bandwidth

    def decode_work(self, batch: float, context: float) -> Work:
        """One token for each of ``batch`` sequences that have ``context`` tokens behind them."""
        kv_bytes = kv_bytes_per_token(self.shape, self.kv)
        return Work(
            flops=batch * self.token_flops(context),
            num_bytes=self.streamed_bytes + batch * context * kv_bytes,
        )

    def prefill_work(self, num_tokens: float) -> Work:
        """``num_tokens`` tokens of a prompt at once; a token looks back at half of them on average (causal mask)."""
        kv_bytes = kv_bytes_per_token(self.shape, self.kv)
        return Work(
            flops=num_tokens * self.token_flops(num_tokens / 2),
            num_bytes=self.streamed_bytes + num_tokens * kv_bytes,
        )

    def token_flops(self, context: float) -> float:
        """FLOPs of one token: 2 per weight, and 4 per position and width of attention in each layer.

        Kaplan et al. (2020), equation 2.2, has 2 for the attention: there the mean over a causal context is taken.
        """
        attention = 4 * self.shape.num_layers * self.shape.attention_width * context
        return 2 * self.shape.computed_params + attention

    def time_s(self, work: Work) -> float:
        """Seconds of ``work`` on the roof."""
        return max(
            work.flops / self.device.rate(self.weights), work.num_bytes / self.device.bandwidth
        )

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds of a decode step."""
        return self.time_s(self.decode_work(batch, context))

    def prefill_s(self, num_tokens: float) -> float:
        """Seconds until a prompt is computed, if nothing else runs."""
        return self.time_s(self.prefill_work(num_tokens))

    def tokens_per_s(self, batch: int, context: float) -> float:
        """The ceiling of decoded tokens per second."""
        return batch / self.decode_s(batch, context)

    def compute_bound_batch(self, context: float) -> int | None:
        """The smallest batch from which on arithmetic limits a decode step; None if no batch is large enough.

        Each sequence brings its own keys and values to read. Where these take longer than its multiplications, a
        larger batch never gets off the slope of the roof.
        """
        kv_bytes = context * kv_bytes_per_token(self.shape, self.kv)
        gain = self.token_flops(context) / self.ridge - kv_bytes
        if gain <= 0:
            return None
        return max(math.ceil(self.streamed_bytes / gain), 1)

    def weights_bound_batch(self) -> float:
        """The same without keys and values: where the intensity 2B/d of a batch B reaches the ridge point."""
        return self.ridge * bits_per_weight(self.weights, self.group_size) / 16


def batch_intensity(batch: float, weights: str) -> float:
    """FLOP per byte of weights in a decode step: each weight of d bytes is read once and used 2B times: 2B/d."""
    return 2 * batch / (BITS[weights] / 8)


def cache_note(device: Device, streamed_bytes: float) -> str:
    """Why a step may be faster than the floor; empty if it may not."""
    if not device.cache_bytes or streamed_bytes > 2 * device.cache_bytes:
        return ""
    relation = "fit into" if streamed_bytes <= device.cache_bytes else "are held in part by"
    return (
        f"The weights of a step ({streamed_bytes / 1e6:,.0f} MB) {relation} the last-level cache of this machine "
        f"({device.cache_bytes / 1e6:,.0f} MB), so a step may be faster than the floor, which is reckoned from memory."
    )


# ------------------------------------------------------------------------------------------------------------ cost


def cost_per_1k_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """What 1,000 tokens cost on a device that costs ``price_per_hour`` and gives ``tokens_per_s``."""
    return 1000 * price_per_hour / 3600 / tokens_per_s


def cost_per_query(
    roofline: Roofline, *, price_per_hour: float, prompt_tokens: int, output_tokens: int, batch: int
) -> float:
    """What one request costs: its prompt alone on the device, and its share of the decode steps of a batch."""
    context = prompt_tokens + output_tokens / 2
    decode_s = output_tokens * roofline.decode_s(batch, context) / batch
    return price_per_hour / 3600 * (roofline.prefill_s(prompt_tokens) + decode_s)
