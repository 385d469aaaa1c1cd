"""`manage.py prepare`: everything made once, credentials kept, a second start skips what is done."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane.access import services as access
from controlplane.access.models import ApiKey
from controlplane.console.home import Home
from controlplane.console.management.commands import prepare
from controlplane.endpoints.models import Endpoint
from controlplane.registry import imports
from controlplane.registry.models import Version
from tests.controlplane.registry.test_services import MANIFEST

pytestmark = pytest.mark.django_db


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[Home]:
    """A fresh home whose weights are there, with the importer's child process replaced by its report."""
    weights = tmp_path / "tiny.gguf"
    weights.touch()
    settings.MODEL_ROOTS = (tmp_path,)
    monkeypatch.setenv("TATKAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(prepare, "_find_weights", lambda: weights)
    monkeypatch.setattr(Home, "lock", lambda self: None)
    monkeypatch.setattr("controlplane.console.home.check_ports", lambda host, ports: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    report = imports.ImportReport(Path("/artifacts/abc"), MANIFEST)
    monkeypatch.setattr(imports, "run_import", lambda *args, **kwargs: report)
    before = dict(os.environ)
    yield Home.of_environment(os.environ)
    os.environ.clear()
    os.environ.update(before)


def run() -> str:
    output = StringIO()
    call_command("prepare", stdout=output)
    return output.getvalue()


def read(home: Home) -> dict[str, Any]:
    return home.read_run()


def test_a_fresh_home_has_all_that_a_first_request_needs(home: Home) -> None:
    output = run()
    assert [line.split(" ...")[0] for line in output.splitlines()] == [
        "[1/5] home and ports",
        "[2/5] secrets and Redis",
        "[3/5] database",
        "[4/5] model smollm2-135m-instruct",
        "[5/5] endpoint and credentials",
    ]
    told = read(home)
    assert stat.S_IMODE(home.run_file.stat().st_mode) == 0o600
    assert Endpoint.objects.get(name=told["endpoint"]).live.name == "smollm2-135m-instruct/1"
    assert access.find(token=told["api_key"], now=timezone.now()).kind == ApiKey.Kind.INFERENCE
    token = access.authenticate_control(token=told["control_token"], now=timezone.now())
    assert token.role == ApiKey.Role.APPROVER
    admin = get_user_model().objects.get(username=told["admin_user"])
    assert admin.check_password(told["admin_password"])
    assert admin.is_superuser


def test_run_json_tells_what_prometheus_scrapes(home: Home, settings: Any) -> None:
    run()
    gateway, control, *slots = read(home)["metrics_urls"]
    assert gateway == f"http://127.0.0.1:{settings.GATEWAY_PORT}/metrics"
    assert control == f"http://127.0.0.1:{settings.CONTROL_PORT}/metrics"
    first = int(os.environ["TATKAL_METRICS_PORT"])
    assert slots == [f"http://127.0.0.1:{first + index}/metrics" for index in range(3)]


def test_slots_without_metrics_are_not_scraped(
    home: Home, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TATKAL_METRICS_PORT", "0")
    settings.METRICS_PORT = 0
    run()
    assert len(read(home)["metrics_urls"]) == 2


def test_the_quantised_version_waits_for_the_worker(home: Home) -> None:
    run()
    second = Version.objects.named("smollm2-135m-instruct/2").get()
    assert second.state == Version.State.PENDING
    assert second.keep_quantized
    assert "dequantised weights" in second.description


def test_a_second_run_changes_nothing(home: Home) -> None:
    run()
    told, rows = read(home), count_rows()
    run()
    assert read(home) == told
    assert count_rows() == rows


def test_credentials_whose_clear_text_is_lost_are_replaced_and_the_old_ones_ended(
    home: Home,
) -> None:
    run()
    old = read(home)
    home.run_file.unlink()
    run()
    new = read(home)
    with pytest.raises(access.InvalidToken):
        access.find(token=old["api_key"], now=timezone.now())
    assert access.find(token=new["api_key"], now=timezone.now())
    assert new["admin_password"] == "", "a person's password is never reset behind their back"
    admin = get_user_model().objects.get(username="admin")
    assert admin.check_password(old["admin_password"])


def test_a_crash_before_the_commit_leaves_nothing_that_opens(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as crash:
        crash.setattr(Home, "write_run", lambda self, run: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run()
    assert not ApiKey.objects.exists()
    run()
    assert access.find(token=read(home)["api_key"], now=timezone.now())


def test_an_interrupted_import_is_taken_over_by_the_next_start(home: Home) -> None:
    run()
    Version.objects.filter(number=2).update(
        state=Version.State.IMPORTING, import_started_at=timezone.now()
    )
    Endpoint.objects.all().delete()
    Version.objects.filter(number=1).update(
        state=Version.State.IMPORTING, artifact="", import_started_at=timezone.now()
    )
    run()
    assert Version.objects.named("smollm2-135m-instruct/1").get().is_ready


def test_weights_that_cannot_be_imported_stop_the_start_with_the_reason(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> imports.ImportReport:
        raise imports.ImportFailed("broken_artifact", "the file ends in the middle")

    monkeypatch.setattr(imports, "run_import", refuse)
    with pytest.raises(CommandError, match="the file ends in the middle"):
        run()
    assert not Endpoint.objects.exists()


def count_rows() -> list[int]:
    users = get_user_model()
    return [model.objects.count() for model in (Version, Endpoint, ApiKey, users)]
