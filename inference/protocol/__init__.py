"""The messages between gateways and engine slots: plain values, JSON both ways.

Every name that crosses Redis is defined here once. A slot answers a request with *rows*. Those of each choice are
numbered from 0 without gaps: row ``seq`` belongs to output token ``seq``, and the last row of a choice carries
``finish``. A row with ``failure`` ends the request whole. A request that is run again after a crash sends the same
numbers under a higher ``attempt``.
"""

from inference.protocol.answers import (
    COPY_ARMS,
    COPY_RUN_S,
    COPY_WAIT_S,
    GOLDEN,
    LIVE,
    SCORE,
    SELF,
    SHADOW,
    Answer,
    copy_id,
)
from inference.protocol.records import FeedbackRecord, RequestRecord, read_record
from inference.protocol.requests import MAX_CHOICES, ChatMessage, GenerateRequest, QueueEntry
from inference.protocol.routes import Resident, Route
from inference.protocol.rows import (
    Failure,
    Finished,
    Score,
    StepFrame,
    TokenLogprob,
    TokenRow,
)
from inference.protocol.sampling import (
    DEFAULTABLE,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    FinishReason,
    InvalidParameter,
    SamplingParams,
)

__all__ = [
    "COPY_ARMS",
    "COPY_RUN_S",
    "COPY_WAIT_S",
    "DEFAULTABLE",
    "GOLDEN",
    "LIVE",
    "MAX_CHOICES",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_STOP_LENGTH",
    "MAX_STOP_STRINGS",
    "SCORE",
    "SELF",
    "SHADOW",
    "Answer",
    "ChatMessage",
    "Failure",
    "FeedbackRecord",
    "FinishReason",
    "Finished",
    "GenerateRequest",
    "InvalidParameter",
    "QueueEntry",
    "RequestRecord",
    "Resident",
    "Route",
    "SamplingParams",
    "Score",
    "StepFrame",
    "TokenLogprob",
    "TokenRow",
    "copy_id",
    "read_record",
]
