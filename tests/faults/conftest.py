"""Whole instances to hurt. A module shares one, and each test finds both versions ready in it, the first one live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.instance import NEW, OLD, Instance
from tests.faults.states import has_ready


@pytest.fixture(scope="module")
def shared_instance(
    prepared_home: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Instance]:
    """The module says in ``MAX_REQUESTS`` how many a slot runs at once, and in ``ENV`` what else is different."""
    path = tmp_path_factory.mktemp("instance") / "home"
    max_requests: int = request.module.MAX_REQUESTS
    env: dict[str, str] = getattr(request.module, "ENV", {})
    with Instance(prepared_home, path, max_requests=max_requests, **env) as instance:
        yield instance


@pytest.fixture
def instance(shared_instance: Instance) -> Instance:
    """The module's instance with ``OLD`` live and ``NEW`` held ready by another slot."""
    shared_instance.wait_for(lambda state: state["roles"] is not None, timeout_s=60)
    if shared_instance.endpoint()["live"] != OLD:
        shared_instance.promote(OLD)
    state = shared_instance.endpoint()
    if NEW not in (state["previous"], state["candidate"], state.get("retired")):
        shared_instance.change(candidate=NEW)
    shared_instance.wait_for(
        lambda state: has_ready(state, OLD) and has_ready(state, NEW), timeout_s=60
    )
    return shared_instance
