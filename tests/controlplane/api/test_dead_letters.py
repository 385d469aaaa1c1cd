"""Dead letters over HTTP: the newest first, in pages, for whoever may read."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from controlplane.api import dead_letters
from inference.protocol import QueueEntry
from inference.queue import Delivery, Lane, Queue
from tests.factories import make_control_token

pytestmark = pytest.mark.django_db
PATH = "/api/v1/dead-letters"


def give_up(queue: Queue, num_letters: int, *, endpoint: str = "chat") -> None:
    """What a slot does with requests on their last attempt."""
    for number in range(num_letters):
        entry = QueueEntry(f"{endpoint}-{number}", "gw", 1_000, 61_000, 7, "live")
        delivery = Delivery("1-0", 3, entry)
        queue.send(Lane(endpoint, "tiny/2"), "slot-1.a", {}, dead=[delivery])


@pytest.fixture
def reader() -> Client:
    return Client(headers={"authorization": f"Bearer {make_control_token()}"})


@pytest.fixture(autouse=True)
def connected(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "connection", lambda: queue)


def get(client: Client, path: str, status: int = 200) -> Any:
    response = client.get(path)
    assert response.status_code == status, response.content
    return response.json()


def test_a_dead_letter_tells_which_request_died_where_and_when(
    reader: Client, queue: Queue
) -> None:
    assert get(reader, PATH) == {"next": None, "previous": None, "results": []}
    give_up(queue, 1)
    (letter,) = get(reader, PATH)["results"]
    (stands,) = queue.read_dead(1)
    assert letter == {
        "id": stands.letter_id,
        "request_id": "chat-0",
        "endpoint": "chat",
        "version": "tiny/2",
        "arm": "live",
        "attempts": 3,
        "at": letter["at"],
    }
    assert letter["at"].startswith("20")


def test_they_come_in_pages_the_newest_first_and_each_once(reader: Client, queue: Queue) -> None:
    give_up(queue, 7)
    seen, path = [], f"{PATH}?page_size=3"
    while path:
        page = get(reader, path)
        seen.append([letter["request_id"] for letter in page["results"]])
        give_up(queue, 1, endpoint="later")
        path = page["next"]
    assert [len(names) for names in seen] == [3, 3, 1]
    assert [name for names in seen for name in names] == [f"chat-{n}" for n in range(6, -1, -1)]


def test_a_letter_of_another_release_does_not_hide_the_others(reader: Client, queue: Queue) -> None:
    give_up(queue, 1)
    queue._redis.xadd("dead", {"id": "old", "attempt": "many"})
    assert [row["request_id"] for row in get(reader, PATH)["results"]] == ["old", "chat-0"]


@pytest.mark.parametrize("cursor", ["x", "1", "1-", "-", "+", "(1-0", "1-0-0"])
def test_a_cursor_that_nobody_gave_is_refused(reader: Client, cursor: str) -> None:
    assert reader.get(PATH, {"cursor": cursor}).status_code == 404


def test_with_redis_away_it_is_said(
    reader: Client, absent_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "connection", lambda: absent_queue)
    response = reader.get(PATH)
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "5"
    assert response.json()["code"] == "dead_letters_unknown"
