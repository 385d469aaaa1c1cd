"""A version on disk."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open

from inference.artifact import (
    CHAT_TEMPLATE,
    MANIFEST,
    TOKENIZER,
    WEIGHTS,
    BrokenArtifact,
    Contents,
    NewTensor,
    read_manifest,
    verify,
    write_artifact,
)
from inference.config import ModelConfig

MODEL = ModelConfig(
    family="llama",
    vocab_size=4,
    hidden_size=6,
    intermediate_size=8,
    num_layers=1,
    num_heads=3,
    num_kv_heads=1,
    head_dim=2,
    context_length=16,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    eos_token_ids=(3,),
)
WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)
CODES = np.arange(5, dtype=np.uint8)


def _in_two_pieces(values: npt.NDArray[Any]) -> Iterable[npt.NDArray[Any]]:
    return iter((values[:1], values[1:]))


CONTENTS = Contents(
    model=MODEL,
    tensors=[
        NewTensor("codes", "U8", CODES.shape, lambda: _in_two_pieces(CODES)),
        NewTensor("weight", "F32", WEIGHT.shape, lambda: _in_two_pieces(WEIGHT)),
    ],
    tokenizer='{"text": "ü"}',
    chat_template="{{ messages }}",
    quantization="int4",
    stored_dtype="float32",
    num_parameters=29,
    generation_defaults={"temperature": 0.2},
    source={"format": "gguf", "name": "a.gguf", "sha256": "0" * 64},
)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A valid artifact."""
    return write_artifact(tmp_path / "root", CONTENTS)


def _edit_manifest(artifact: Path, **changes: Any) -> None:
    data = json.loads((artifact / MANIFEST).read_text())
    data.update(changes)
    (artifact / MANIFEST).write_text(json.dumps(data))


def _identities(artifact: Path) -> dict[str, tuple[int, int]]:
    stats = {path.name: path.stat() for path in artifact.iterdir()}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def test_what_was_written_is_read_and_verified(artifact: Path) -> None:
    manifest = read_manifest(artifact)

    assert manifest == verify(artifact)
    assert manifest.model == MODEL
    assert manifest.generation_defaults == {"temperature": 0.2}
    assert manifest.source == CONTENTS.source
    assert sorted(path.name for path in artifact.iterdir()) == sorted([MANIFEST, *manifest.files])
    sizes = [(artifact / name).stat().st_size for name in manifest.files]
    assert manifest.size_bytes == sum(sizes)
    assert artifact.name == manifest.digest[:16]


def test_the_safetensors_library_reads_the_weights(artifact: Path) -> None:
    with safe_open(artifact / WEIGHTS, framework="numpy") as file:
        assert sorted(file.keys()) == ["codes", "weight"]
        assert np.array_equal(file.get_tensor("weight"), WEIGHT)
        assert np.array_equal(file.get_tensor("codes"), CODES)


def test_every_tensor_begins_at_a_multiple_of_its_item_size(artifact: Path) -> None:
    raw = (artifact / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    assert length % 8 == 0
    assert header["weight"]["data_offsets"] == [0, 96]
    assert header["codes"]["data_offsets"] == [96, 101]


def test_writing_the_same_contents_again_changes_nothing(artifact: Path) -> None:
    before = _identities(artifact)

    again = write_artifact(artifact.parent, CONTENTS)

    assert again == artifact
    assert _identities(artifact) == before
    assert list(artifact.parent.iterdir()) == [artifact]


def test_the_source_alone_does_not_make_another_artifact(artifact: Path) -> None:
    again = write_artifact(artifact.parent, replace(CONTENTS, source={"name": "copy.gguf"}))

    assert again == artifact


@pytest.mark.parametrize(
    "change",
    [
        {"generation_defaults": {}},
        {"chat_template": None},
        {"tokenizer": "{}"},
        {"model": replace(MODEL, eos_token_ids=(2, 3))},
        {"tensors": CONTENTS.tensors[:1]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_decides_an_answer_makes_another_artifact(
    artifact: Path, change: dict[str, Any]
) -> None:
    other = write_artifact(artifact.parent, replace(CONTENTS, **change))

    assert other != artifact
    verify(other)


def test_a_model_without_a_chat_template_has_no_file_for_it(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path, replace(CONTENTS, chat_template=None))

    assert not (artifact / CHAT_TEMPLATE).exists()
    assert verify(artifact).chat_template_digest == ""


@pytest.mark.parametrize("name", [WEIGHTS, TOKENIZER, CHAT_TEMPLATE])
def test_a_changed_byte_is_found_and_named(artifact: Path, name: str) -> None:
    raw = bytearray((artifact / name).read_bytes())
    raw[-1] ^= 1
    (artifact / name).write_bytes(raw)

    with pytest.raises(BrokenArtifact, match=f"{name}: its SHA-256"):
        verify(artifact)


def test_a_damaged_artifact_in_the_place_is_refused_not_overwritten(artifact: Path) -> None:
    (artifact / TOKENIZER).write_text("damaged")

    with pytest.raises(BrokenArtifact, match=TOKENIZER):
        write_artifact(artifact.parent, CONTENTS)

    assert (artifact / TOKENIZER).read_text() == "damaged"
    assert list(artifact.parent.iterdir()) == [artifact]


def test_a_manifest_moved_to_other_contents_is_found(artifact: Path) -> None:
    _edit_manifest(artifact, generation_defaults={"temperature": 2.0})

    with pytest.raises(BrokenArtifact, match="its contents are those of"):
        verify(artifact)


def test_a_link_in_place_of_a_file_is_not_followed(artifact: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (artifact / TOKENIZER).rename(outside)
    (artifact / TOKENIZER).symlink_to(outside)

    with pytest.raises(BrokenArtifact, match="not a regular file") as caught:
        verify(artifact)

    assert caught.value.code == "unsafe_artifact"


def test_a_missing_file_is_named(artifact: Path) -> None:
    (artifact / WEIGHTS).unlink()

    with pytest.raises(BrokenArtifact, match=f"{WEIGHTS}: the file is missing"):
        verify(artifact)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 2}, "format"),
        ({"extra": 1}, "extra"),
        ({"num_parameters": "29"}, "num_parameters"),
        ({"num_parameters": True}, "num_parameters"),
        ({"model": {"family": "llama"}}, "model"),
        ({"model": {**MODEL.to_dict(), "head_dim": 3}}, "model"),
        ({"files": {}}, "files"),
        ({"files": {"../../etc/passwd": "0" * 64}}, "files"),
        ({"weights_digest": "0" * 64}, "files"),
    ],
)
def test_a_manifest_with_a_wrong_field_is_refused_by_its_name(
    artifact: Path, changes: dict[str, Any], named: str
) -> None:
    _edit_manifest(artifact, **changes)

    with pytest.raises(BrokenArtifact, match=named):
        read_manifest(artifact)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": 1, "format": 1}', '{"format": NaN}', "[" * 100_000]
)
def test_a_manifest_that_is_not_json_is_refused(artifact: Path, text: str) -> None:
    (artifact / MANIFEST).write_text(text)

    with pytest.raises(BrokenArtifact, match=MANIFEST):
        read_manifest(artifact)


def test_a_tensor_that_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    def read() -> Iterable[npt.NDArray[Any]]:
        yield WEIGHT[:1]
        raise BrokenArtifact("a.gguf", "weight", "it holds NaN.", "Mend it.")

    tensors = [NewTensor("weight", "F32", WEIGHT.shape, read)]

    with pytest.raises(BrokenArtifact, match="holds NaN"):
        write_artifact(tmp_path, replace(CONTENTS, tensors=tensors))

    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_another_size_than_announced_is_our_bug(tmp_path: Path) -> None:
    tensors = [NewTensor("weight", "F32", (5, 6), lambda: [WEIGHT])]

    with pytest.raises(RuntimeError, match="96 bytes instead of 120"):
        write_artifact(tmp_path, replace(CONTENTS, tensors=tensors))

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_import_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, new = tmp_path / ".incoming-old", tmp_path / ".incoming-new"
    old.mkdir()
    new.mkdir()
    yesterday = time.time() - 25 * 3600
    os.utime(old, (yesterday, yesterday))

    artifact = write_artifact(tmp_path, CONTENTS)

    assert sorted(tmp_path.iterdir()) == sorted([artifact, new])


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []

    write_artifact(tmp_path, CONTENTS, lambda *report: seen.append(report))

    assert seen == [(0, 2, "weight"), (1, 2, "codes"), (2, 2, "weights written")]
