"""A directory of a stranger is read as data."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference.artifact import BrokenArtifact
from inference.importers.directory import MAX_FILES, ModelDirectory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory with one configuration file."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    return path


def _refusal(path: Path) -> BrokenArtifact:
    with pytest.raises(BrokenArtifact) as caught:
        ModelDirectory(path)
    return caught.value


class _Canary:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


def test_the_canary_of_this_file_sings(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(_Canary(tmp_path / "canary")))  # noqa: S301 - our own

    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "a/consolidated.00.PTH", "m.ckpt", "x.npz", "o.pkl"]
)
def test_a_pickle_is_refused_unread(path: Path, tmp_path: Path, name: str) -> None:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(pickle.dumps(_Canary(tmp_path / "canary")))

    refusal = _refusal(path)

    assert refusal.code == "unsupported_format"
    assert name in str(refusal)
    assert not (tmp_path / "canary").exists()


def test_code_beside_the_model_is_refused(path: Path) -> None:
    (path / "modeling_llama.py").write_text("raise SystemExit")

    assert _refusal(path).code == "unsafe_artifact"


@pytest.mark.parametrize("key", ["auto_map", "custom_pipelines"])
def test_a_file_that_asks_to_run_code_is_refused(path: Path, key: str) -> None:
    (path / "config.json").write_text(f'{{"{key}": {{}}}}')

    with pytest.raises(BrokenArtifact, match=key) as caught:
        ModelDirectory(path).json("config.json")

    assert caught.value.code == "unsafe_artifact"


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "sub", "sub/deeper"])
@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_link_out_of_the_directory_is_refused(path: Path, name: str, is_absolute: bool) -> None:
    link = path / name
    link.parent.mkdir(exist_ok=True)
    outside = path.parent / "outside"
    link.symlink_to(outside if is_absolute else os.path.relpath(outside, link.parent))

    refusal = _refusal(path)

    assert refusal.code == "unsafe_artifact"
    assert f"{name}: a link leads out" in str(refusal)


def test_a_link_made_after_the_check_is_refused_when_it_is_read(path: Path) -> None:
    directory = ModelDirectory(path)
    (path / "config.json").rename(path.parent / "outside")
    (path / "config.json").symlink_to(path.parent / "outside")

    with pytest.raises(BrokenArtifact, match="a link leads out"):
        directory.json("config.json")


def test_a_link_within_the_directory_is_followed(path: Path) -> None:
    (path / "blobs").mkdir()
    (path / "config.json").rename(path / "blobs" / "abc")
    (path / "config.json").symlink_to("blobs/abc")

    assert ModelDirectory(path).json("config.json") == {"a": 1}


def test_links_in_a_circle_are_refused(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("config.json")

    with pytest.raises(BrokenArtifact, match=r"config\.json"):
        ModelDirectory(path).json("config.json")


def test_a_pipe_in_place_of_a_file_is_refused(path: Path) -> None:
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")

    with pytest.raises(BrokenArtifact, match="not a regular file"):
        ModelDirectory(path).json("config.json")


@pytest.mark.slow
def test_a_directory_without_an_end_is_refused(path: Path) -> None:
    for index in range(MAX_FILES):
        (path / str(index)).touch()

    assert f"more than {MAX_FILES} files" in str(_refusal(path))


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "gone: no such directory" in str(_refusal(tmp_path / "gone"))


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', '{"a": NaN}'])
def test_a_file_that_is_not_a_json_object_is_refused(path: Path, text: str) -> None:
    (path / "config.json").write_text(text)

    with pytest.raises(BrokenArtifact, match=r"config\.json"):
        ModelDirectory(path).json("config.json")


def test_an_optional_file_that_is_missing_is_empty(path: Path) -> None:
    assert ModelDirectory(path).json("generation_config.json", optional=True) == {}


def test_a_text_that_is_not_utf8_is_refused(path: Path) -> None:
    (path / "chat_template.jinja").write_bytes(b"\xff")

    with pytest.raises(BrokenArtifact, match="not UTF-8"):
        ModelDirectory(path).text("chat_template.jinja")


def test_the_digest_covers_what_was_read(path: Path) -> None:
    (path / "README.md").write_text("not read")
    directory = ModelDirectory(path)
    directory.json("config.json")

    line = f"{hashlib.sha256((path / 'config.json').read_bytes()).hexdigest()}  config.json\n"

    assert directory.digest() == hashlib.sha256(line.encode()).hexdigest()
