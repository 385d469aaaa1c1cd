"""Whether a candidate fits beside what is resident: the numbers, and the moves that are refused by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.endpoints import capacity, services
from controlplane.endpoints.capacity import DoesNotFit, check_candidate, fits_as_candidate
from controlplane.endpoints.models import Endpoint
from controlplane.endpoints.slots import Report
from controlplane.registry.models import Version
from inference.planner.memory import MARGIN_BYTES
from inference.queue import Queue
from inference.replicas import SlotState, SlotStatus
from tests.controlplane.small_artifact import make_planned_version
from tests.factories import NOW, make_endpoint, make_version

pytestmark = pytest.mark.django_db
GIB = 2**30
MIB = 2**20


@pytest.fixture
def big(tmp_path: Path) -> Version:
    """A version that takes some 3.1 GiB while it is loaded."""
    return make_planned_version(tmp_path, model="big")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the machine has left."""

    def set_room(num_bytes: int | None) -> None:
        monkeypatch.setattr(capacity, "available_bytes", lambda: num_bytes)

    return set_room


def _slot(version: str, endpoint: str = "chat", **fields: Any) -> SlotStatus:
    return SlotStatus("slot-1", endpoint, version, SlotState.READY, weight_bytes=GIB, **fields)


def test_what_is_needed_is_what_the_engine_will_ask_for(big: Version, room: Any) -> None:
    room(8 * GIB)
    fit = fits_as_candidate(big, endpoint=None, report=None)
    assert fit.fits
    assert fit.needed is not None
    assert fit.needed.weights == pytest.approx(2.2e9, rel=0.01)
    # 64 MiB hold more than one sequence of 512 tokens with 22,528 bytes each.
    assert fit.needed.kv_cache == 64 * MIB // (16 * 22_528) * 16 * 22_528
    assert fit.needed.working > MARGIN_BYTES


def test_a_byte_too_few_is_refused_with_numbers_and_mend(big: Version, room: Any) -> None:
    room(8 * GIB)
    needed = fits_as_candidate(big, endpoint=None, report=None).needed
    assert needed is not None
    room(needed.total)
    check_candidate(big, endpoint=None, report=None)
    room(needed.total - 1)
    report = Report(slots=[_slot("tiny/1")])
    with pytest.raises(DoesNotFit) as refusal:
        check_candidate(big, endpoint=None, report=report)
    told = refusal.value.message
    for part in (
        "big/1 needs",
        "weights 2,",
        "KV cache 64 MiB",
        "tiny/1 in slot-1, 1,024 MiB",
        "narrower",
    ):
        assert part in told
    fit = refusal.value.details["fit"]
    assert fit["needed_bytes"] == needed.total
    assert fit["available_bytes"] == needed.total - 1
    assert fit["residents"] == [{"slot": "slot-1", "version": "tiny/1", "weight_bytes": GIB}]


def test_the_candidate_whose_place_is_taken_makes_room(big: Version, room: Any) -> None:
    leaving = make_version()
    endpoint = make_endpoint("chat", candidate=leaving)
    room(3 * GIB - 300 * MIB)
    report = Report(slots=[_slot(leaving.name)])
    assert not fits_as_candidate(big, endpoint=None, report=report).fits
    fit = fits_as_candidate(big, endpoint=endpoint, report=report)
    assert fit.freed == GIB
    assert fit.fits
    elsewhere = Report(slots=[_slot(leaving.name, endpoint="other")])
    assert fits_as_candidate(big, endpoint=endpoint, report=elsewhere).freed == 0


def test_a_version_that_is_resident_fits(big: Version, room: Any) -> None:
    room(0)
    endpoint = make_endpoint("chat")
    report = Report(slots=[_slot(big.name)])
    assert fits_as_candidate(big, endpoint=endpoint, report=report).fits
    other = Report(slots=[_slot(big.name, endpoint="other")])
    assert not fits_as_candidate(big, endpoint=endpoint, report=other).fits


def test_what_nobody_knows_counts_as_there(big: Version, room: Any, settings: Any) -> None:
    room(None)
    assert fits_as_candidate(big, endpoint=None, report=None).fits
    room(0)
    assert fits_as_candidate(make_version(), endpoint=None, report=None).fits, "no artifact here"
    settings.SLOTS_ARE_HERE = False
    assert fits_as_candidate(big, endpoint=None, report=None).fits, "slots run elsewhere"


def test_setting_a_candidate_that_cannot_fit_changes_nothing(
    big: Version, room: Any, queue: Queue
) -> None:
    make_endpoint("chat")
    room(GIB)
    with pytest.raises(DoesNotFit):
        services.set_candidate(name="chat", version=big.name, actor="ada", now=NOW, queue=queue)
    assert Endpoint.objects.get(name="chat").candidate is None
    room(8 * GIB)
    services.set_candidate(name="chat", version=big.name, actor="ada", now=NOW, queue=queue)
    room(0)
    services.configure(
        name="chat", candidate=big.name, canary_bp=100, actor="ada", now=NOW, queue=queue
    )
    assert Endpoint.objects.get(name="chat").canary_bp == 100, "it is the candidate already"
