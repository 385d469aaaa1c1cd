"""Kills a control worker at statements of a real database file, again and again, and looks at what is left.

For a process of its own, with Django set up: ``main(case)`` prints how many workers were killed, and how many of them
after what they did was committed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from django.conf import settings
from django.core.management import call_command
from django.db import connection

from controlplane.endpoints.models import Endpoint
from inference.queue import Queue
from tests.controlplane.rollouts.crashes import Fuse, fused
from tests.controlplane.rollouts.test_crashes import (
    CASES,
    Action,
    again,
    check_end,
    check_weight,
    restore,
)
from tests.controlplane.rollouts.world import World

# Of all boundaries so many, evenly; ``test_crashes`` dies at every one, within one process.
NUM_KILLS = 8


def main(case: str) -> None:
    """Prepare, then kill a fork at each of some boundaries, and let the others finish the work."""
    call_command("migrate", interactive=False, verbosity=0)
    before, act, end = CASES[case]
    world = World(Queue(settings.REDIS_URL))
    before(world)
    base, kept = world.endpoint.generation, Snapshot()
    uncut = Fuse()
    with fused(world.queue, uncut):
        act(world)
    boundaries = uncut.boundaries[:: max(1, len(uncut.boundaries) // NUM_KILLS)]
    num_killed = num_committed = 0
    for number in boundaries:
        kept.restore()
        restore(world)
        world.report()
        num_killed += kill_at(number, world, act)
        is_done = Endpoint.objects.get(name="chat").generation != base
        num_committed += is_done
        check_weight(world)
        again(world, act, is_done=is_done)
        check_end(world, end)
    sys.stdout.write(json.dumps({"killed": num_killed, "committed": num_committed}))


def kill_at(number: int, world: World, act: Action) -> bool:
    """Whether a fork that began ``act`` was killed at boundary ``number``."""
    connection.close()
    pid = os.fork()
    if pid == 0:
        world.queue = Queue(settings.REDIS_URL)  # a connection is no two processes'
        for member in (*world.spare, *world.members.values()):
            member._queue = world.queue
        with fused(world.queue, Fuse(number, lambda: os.kill(os.getpid(), signal.SIGKILL))):
            act(world)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


class Snapshot:
    """The database as it was, to be put back."""

    def __init__(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        self.path = Path(settings.DATABASES["default"]["NAME"])
        self.content = self.path.read_bytes()

    def restore(self) -> None:
        """Put the file back, without what came after it."""
        connection.close()
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self.path.write_bytes(self.content)
