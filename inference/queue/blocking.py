"""The blocking door of slots and control plane."""

from __future__ import annotations

from inference.queue.control import ControlCalls
from inference.queue.copies import CopyCalls
from inference.queue.slots import SlotCalls


class Queue(ControlCalls, CopyCalls, SlotCalls):
    """All sides over one connection; safe to share between threads."""
