"""The messages between gateways and engine slots: plain values, JSON both ways.

Every name that crosses Redis is defined here once. A slot answers a request with *rows*, numbered from 0
without gaps: row ``seq`` belongs to output token ``seq``, and the last row carries ``finish`` or ``failure``.
A request that is run again after a crash sends the same numbers under a higher ``attempt``.
"""

from inference.protocol.records import RequestRecord
from inference.protocol.requests import ChatMessage, GenerateRequest, QueueEntry
from inference.protocol.routes import Resident, Route
from inference.protocol.rows import Failure, Finished, StepFrame, TokenRow
from inference.protocol.sampling import (
    DEFAULTABLE,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    FinishReason,
    InvalidParameter,
    SamplingParams,
)

__all__ = [
    "DEFAULTABLE",
    "MAX_LOGIT_BIAS",
    "MAX_STOP_LENGTH",
    "MAX_STOP_STRINGS",
    "ChatMessage",
    "Failure",
    "FinishReason",
    "Finished",
    "GenerateRequest",
    "InvalidParameter",
    "QueueEntry",
    "RequestRecord",
    "Resident",
    "Route",
    "SamplingParams",
    "StepFrame",
    "TokenRow",
]
