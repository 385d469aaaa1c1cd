"""What stands behind two operators: prepares a database, and afterwards tells what it holds.

For a process of its own, with Django set up: ``main("prepare")`` prints a token for each operator, ``main("tell")``
what happened.
"""

from __future__ import annotations

import json
import sys

from django.conf import settings
from django.core.management import call_command
from django.utils import timezone

from controlplane.access import services as access
from controlplane.endpoints import publication
from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.routing import route_of
from controlplane.events.models import Event
from controlplane.events.services import verify
from inference.queue import Queue
from tests.factories import make_endpoint, make_version


def prepare() -> list[str]:
    """Three versions, ``chat`` with the first live, and two operators, one in each control process."""
    call_command("migrate", interactive=False, verbosity=0)
    versions = [make_version() for _ in range(3)]
    make_endpoint("chat", live=versions[0])
    publication.publish(name="chat", queue=Queue(settings.REDIS_URL), now=timezone.now())
    return [
        access.issue(
            name=name, kind="control", role="engineer", actor="test", now=timezone.now()
        ).clear_text
        for name in ("ada", "bob")
    ]


def tell() -> dict[str, object]:
    """The generations that events speak of, whether their chain holds, and whether Redis equals the row."""
    # A version that loses its standby to another is told beside the change that took it.
    about = Event.objects.about("endpoint:chat").in_order()
    events = about.exclude(type="endpoint.standby_ended")
    row = Endpoint.objects.with_versions().get(name="chat")
    route = Queue(settings.REDIS_URL).read_route("chat")
    return {
        "generations": [event.data["generation"] for event in events],
        "problem": verify().problem,
        "row": row.generation,
        "is_same": route == route_of(row.to_state()),
    }


def main(what: str) -> None:
    """Print what is asked for, as JSON."""
    sys.stdout.write(json.dumps({"prepare": prepare, "tell": tell}[what]()))
