"""Redis, spoken in this package and nowhere else: every key, every connection, one method per need.

``Queue`` is the blocking door of slots and control plane, ``AsyncQueue`` the gateway's. Each rule that must not be
seen half done is one Lua script (``inference/lua``). No call is repeated behind the caller's back, because most are not
idempotent: a lost connection or a timeout is ``QueueUnavailable``, and the caller knows what it means there.

Needs one Redis 7 or Valkey server (no cluster), append-only file on, ``maxmemory-policy noeviction``.
"""

from inference.queue.blocking import Queue
from inference.queue.copies import FinishedCopy, Half, TakenCopy
from inference.queue.lanes import (
    Adoption,
    Applied,
    DeadLetter,
    Delivery,
    Lane,
    LaneCount,
    Lease,
    LogEntry,
    Notice,
    Placement,
)
from inference.queue.link import OutageLog, QueueUnavailable
from inference.queue.nonblocking import AsyncQueue, NoReadySlot, QueueFull, UnknownEndpoint

__all__ = [
    "Adoption",
    "Applied",
    "AsyncQueue",
    "DeadLetter",
    "Delivery",
    "FinishedCopy",
    "Half",
    "Lane",
    "LaneCount",
    "Lease",
    "LogEntry",
    "NoReadySlot",
    "Notice",
    "OutageLog",
    "Placement",
    "Queue",
    "QueueFull",
    "QueueUnavailable",
    "TakenCopy",
    "UnknownEndpoint",
]
