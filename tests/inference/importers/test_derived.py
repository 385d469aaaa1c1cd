"""Registering an artifact again: proven whole, and with another chat template sharing its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inference.artifact import CHAT_TEMPLATE, TOKENIZER, WEIGHTS, BrokenArtifact, verify
from inference.importers.derived import import_artifact


@pytest.fixture
def artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the random model that a test may hurt."""
    copy = tmp_path / "root" / tiny_artifact.name
    shutil.copytree(tiny_artifact, copy)
    return copy


def _template(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "new.jinja"
    path.write_bytes(text.encode())
    return path


def test_without_a_template_the_artifact_itself_is_the_result(artifact: Path) -> None:
    assert import_artifact(artifact, artifact.parent) == artifact
    assert list(artifact.parent.iterdir()) == [artifact]


def test_a_damaged_artifact_is_not_taken_over(artifact: Path) -> None:
    (artifact / TOKENIZER).write_text("{}")
    with pytest.raises(BrokenArtifact, match=r"tokenizer\.json: its SHA-256"):
        import_artifact(artifact, artifact.parent)


def test_another_template_shares_the_weights(artifact: Path, tmp_path: Path) -> None:
    text = "{{ messages }}<|im_end|>"
    derived = import_artifact(artifact, artifact.parent, chat_template=_template(tmp_path, text))

    old, new = verify(artifact), verify(derived)
    assert derived != artifact
    assert (derived / CHAT_TEMPLATE).read_text() == text
    assert new.chat_template_digest != old.chat_template_digest
    assert (new.weights_digest, new.tokenizer_digest) == (old.weights_digest, old.tokenizer_digest)
    assert new.model == old.model
    assert new.size_bytes == sum(
        (derived / name).stat().st_size for name in (WEIGHTS, TOKENIZER, CHAT_TEMPLATE)
    )
    assert (derived / WEIGHTS).samefile(artifact / WEIGHTS), "the weights lie on disk once"
    assert len(list(artifact.parent.iterdir())) == 2, "nothing half written is left"


def test_the_same_template_leads_to_the_same_place(artifact: Path, tmp_path: Path) -> None:
    same = _template(tmp_path, (artifact / CHAT_TEMPLATE).read_text())
    assert import_artifact(artifact, artifact.parent, chat_template=same) == artifact
    other = _template(tmp_path, "{{ messages }}")
    first = import_artifact(artifact, artifact.parent, chat_template=other)
    assert import_artifact(artifact, artifact.parent, chat_template=other) == first


def test_where_no_link_can_be_the_weights_are_copied(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    derived = import_artifact(
        artifact, tmp_path / "elsewhere", chat_template=_template(tmp_path, "x")
    )
    verify(derived)
    assert not (derived / WEIGHTS).samefile(artifact / WEIGHTS)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"{% for %}", "chat template: line 1"),
        (b"\xff", "it is not UTF-8"),
        (b"x" * (256 * 2**10 + 1), "longer than"),
    ],
)
def test_a_template_that_cannot_be_is_refused(
    artifact: Path, tmp_path: Path, raw: bytes, told: str
) -> None:
    path = tmp_path / "new.jinja"
    path.write_bytes(raw)
    with pytest.raises(BrokenArtifact, match=told):
        import_artifact(artifact, artifact.parent, chat_template=path)
    assert list(artifact.parent.iterdir()) == [artifact]


def test_a_template_behind_a_link_is_refused(artifact: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jinja"
    link.symlink_to(_template(tmp_path, "x"))
    with pytest.raises(BrokenArtifact, match="not a regular file"):
        import_artifact(artifact, artifact.parent, chat_template=link)
