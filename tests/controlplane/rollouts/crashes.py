"""Dying on purpose: before the n-th statement to the database or the n-th call to Redis, whichever comes as the n-th."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

from inference.queue import Queue

CALLS = ("apply_route", "publish_desired", "withdraw_route")


class Killed(BaseException):
    """The process ended here: nothing of ours catches it."""


class Fuse:
    """Counts boundaries, and kills at one of them."""

    def __init__(self, kill_at: int | None = None, kill: Callable[[], None] | None = None) -> None:
        self.kill_at = kill_at
        self.passed: list[bool] = []  # whether what came after the boundary changes anything
        self._kill = kill or _raise

    def pass_by(self, *, is_change: bool) -> None:
        """One more boundary."""
        self.passed.append(is_change)
        if len(self.passed) == self.kill_at:
            self._kill()

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """Around a statement."""
        self.pass_by(is_change=not sql.startswith("SELECT"))
        return execute(sql, params, many, context)

    @property
    def boundaries(self) -> list[int]:
        """Numbers of the boundaries before and after a change; dying between two reads is like dying before them."""
        pairs = zip([True, *self.passed], self.passed, strict=False)
        return [number for number, pair in enumerate(pairs, start=1) if any(pair)]


@contextmanager
def fused(queue: Queue, fuse: Fuse) -> Iterator[None]:
    """Let every statement, and every call that changes something in Redis, pass by ``fuse``."""
    cls = type(queue)
    originals = {name: getattr(cls, name) for name in CALLS}

    def guarded(name: str) -> Callable[..., Any]:
        def call(self: Queue, *args: Any, **kwargs: Any) -> Any:
            fuse.pass_by(is_change=True)
            answer = originals[name](self, *args, **kwargs)
            # The call has been carried out, and nobody has heard its answer.
            fuse.pass_by(is_change=True)
            return answer

        return call

    for name in CALLS:
        setattr(cls, name, guarded(name))
    try:
        with connection.execute_wrapper(fuse):
            yield
    finally:
        for name, original in originals.items():
            setattr(cls, name, original)


def _raise() -> None:
    raise Killed
