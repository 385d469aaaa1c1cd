"""The planner: what fits on a device, how fast, and what it costs."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.drf import Body
from controlplane.api.resources import Resource
from controlplane.registry import plans

MAX_LENGTHS = 10_000
_MOST = 10**15


def _whole(help_text: str, low: int = 1) -> serializers.IntegerField:
    return serializers.IntegerField(
        required=False, min_value=low, max_value=_MOST, help_text=help_text
    )


def _number(help_text: str) -> serializers.FloatField:
    return serializers.FloatField(required=False, min_value=0, help_text=help_text)


class PlanQuestion(Body):
    """A device, and a model by its sizes or as a version of the registry."""

    hardware = serializers.CharField(
        help_text="A device such as `a100-40gb` or `h200`, or `this-machine` once it was calibrated."
    )
    version = serializers.CharField(
        required=False, help_text="`model/number`, in place of the sizes."
    )
    params = _number("Number of weights.")
    num_layers = _whole("Layers.")
    hidden_size = _whole("Width of the residual stream.")
    num_heads = _whole("Query heads; by default 128 wide each.")
    num_kv_heads = _whole("Heads of keys and values; by default as many as query heads.")
    head_dim = _whole("Width of a head.")
    weights = serializers.CharField(
        required=False, help_text="fp32, bf16, fp16, fp8, int8 or int4; default fp16."
    )
    group_size = _whole("Columns that share a scale; 0: scales are not counted.", low=0)
    kv = serializers.CharField(required=False, help_text="Format of keys and values; default fp16.")
    # The framework has an attribute of that name, and takes fields out of the class before it is made.
    context = _whole("Tokens of a sequence, prompt and answer; default 2048.")  # type: ignore[assignment]
    block_size = _whole("Tokens of a KV block; default 16.")
    headroom = _number("Share of memory that is left to others, 0 to 0.2; default 0.")
    batch = _whole("Sequences of a step; by default as many as fit.")
    prompt_tokens = _whole("Of a request; default 512.")
    output_tokens = _whole("Of a request; default 128.")
    price_per_hour = _number("Of the device, in any currency.")
    with_standby = serializers.BooleanField(
        required=False, help_text="Tell the price of a standby and of a candidate."
    )
    rate = _number("Requests a second; with `ttft_s` and `tpot_s` it asks for replicas.")
    ttft_s = _number("Seconds within which 99 of 100 requests are to have their first token.")
    tpot_s = _number("Seconds from one token to the next, on average.")
    output_cv2 = _number("Squared coefficient of variation of answers' lengths; default 1.")
    lengths = serializers.ListField(
        child=serializers.IntegerField(min_value=1, max_value=10**6),
        required=False,
        max_length=MAX_LENGTHS,
        help_text="Lengths of answers, to be batched statically and continuously.",
    )


class PriceAnswer(serializers.Serializer[Any]):
    """What something beside the live version takes from it."""

    num_bytes = serializers.FloatField()
    sequences_left = serializers.IntegerField()
    sequences = serializers.IntegerField()


class WhatIfAnswer(serializers.Serializer[Any]):
    """The same with other weights and another context."""

    weights = serializers.CharField()
    context = serializers.IntegerField()  # type: ignore[assignment]
    weight_bytes = serializers.FloatField()
    free_bytes = serializers.FloatField()
    sequences = serializers.IntegerField()
    decode_floor_s = serializers.FloatField()
    tokens_per_s = serializers.FloatField(allow_null=True)


class PlanAnswer(serializers.Serializer[Any]):
    """What follows. Times are seconds, and the least that they can be; rates the most."""

    hardware = serializers.DictField(help_text="The device, with the source of its numbers.")
    model = serializers.DictField(help_text="Its sizes, with everything that was filled in.")
    weights = serializers.CharField()
    kv = serializers.CharField()
    context = serializers.IntegerField()  # type: ignore[assignment]
    headroom = serializers.FloatField()
    weight_bytes = serializers.FloatField()
    free_bytes = serializers.FloatField()
    kv_bytes_per_token = serializers.IntegerField()
    num_blocks = serializers.IntegerField()
    sequences = serializers.IntegerField(help_text="Of `context` tokens, at once.")
    ridge = serializers.FloatField(help_text="FLOP per byte.")
    decode_floor_s = serializers.FloatField()
    prefill_s = serializers.FloatField()
    weights_bound_batch = serializers.FloatField()
    compute_bound_batch = serializers.IntegerField(
        allow_null=True, help_text="Null: decoding never turns compute-bound at this context."
    )
    batch = serializers.IntegerField()
    batch_intensity = serializers.FloatField(help_text="2B/d: FLOP per byte of weights.")
    intensity = serializers.FloatField(allow_null=True)
    decode_s = serializers.FloatField(allow_null=True)
    decode_flops_per_s = serializers.FloatField(allow_null=True)
    tokens_per_s = serializers.FloatField(allow_null=True)
    standby = PriceAnswer(allow_null=True)
    candidate = PriceAnswer(allow_null=True)
    cost = serializers.DictField(allow_null=True)
    service = serializers.DictField(allow_null=True)
    queue_model = serializers.CharField(allow_null=True)
    batching = serializers.DictField()
    what_ifs = WhatIfAnswer(many=True)
    notes = serializers.ListField(child=serializers.CharField())


class PlanResource(Resource):
    """A calculation: nothing is kept and nothing changes."""

    write_role = "viewer"

    @extend_schema(operation_id="plan", request=PlanQuestion, responses={200: PlanAnswer})
    def post(self, request: Request) -> Response:
        """How many sequences fit, what limits a step, what a standby and a query cost, how many replicas are needed.

        Refused with 400 ``invalid_plan``, which names the value in ``errors``, where nothing can be planned with it.
        """
        body = PlanQuestion(data=request.data)
        body.is_valid(raise_exception=True)
        return Response(plans.plan(body.validated_data).to_dict())
