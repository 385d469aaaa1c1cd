"""A ready version does not change, whoever asks."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, transaction

from controlplane.registry.models import Version, VersionImmutable
from tests.factories import make_version

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("artifact", "/elsewhere"),
        ("engine_options", {"block_size": 32}),
        ("dtype", "float32"),
        ("state", "failed"),
        ("number", 9),
    ],
)
def test_a_ready_version_does_not_change(field: str, value: object) -> None:
    version = make_version()
    setattr(version, field, value)
    with pytest.raises(VersionImmutable, match=field):
        version.save()
    with pytest.raises(VersionImmutable):
        version.delete()


def test_people_may_describe_a_ready_version() -> None:
    version = make_version()
    version.description = "The one that knows more about trains."
    version.notes, version.run_link = "Ask Ada.", "https://mlflow.test/7"
    version.save()
    assert Version.objects.get().description.endswith("trains.")


def test_the_database_refuses_a_ready_version_without_an_artifact() -> None:
    with pytest.raises(DatabaseError), transaction.atomic():
        make_version(artifact="")


@pytest.mark.parametrize("name", ["tiny", "tiny/", "tiny/x", "tiny/²", "tiny/99999999999", "/1"])
def test_a_malformed_name_names_no_version(name: str) -> None:
    make_version()
    assert not Version.objects.named(name).exists()
    assert Version.objects.named("tiny/1").exists()
