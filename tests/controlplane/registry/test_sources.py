"""Where sources of versions may lie: whatever the path looks like, what counts is what it leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.registry.sources import (
    SourceRefused,
    allowed_roots,
    find_directory,
    find_file,
    suggest,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An allowed root with a file and a directory; beside it a file that is none of our business."""
    root = tmp_path / "models"
    (root / "llama").mkdir(parents=True)
    (root / "llama" / "config.json").write_text("{}")
    (root / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "secret.gguf").write_bytes(b"GGUF")
    return root


def test_files_and_directories_below_a_root_are_found(root: Path) -> None:
    assert find_file(str(root / "a.gguf"), [root]) == root / "a.gguf"
    assert find_directory(str(root / "llama"), [root]) == root / "llama"
    assert find_file(str(root / "llama" / ".." / "a.gguf"), [root]) == root / "a.gguf"


@pytest.mark.parametrize("path", ["../secret.gguf", "llama/../../secret.gguf", "../models2/a.gguf"])
def test_dots_do_not_lead_out_and_the_refusal_names_the_root(root: Path, path: str) -> None:
    sibling = root.parent / "models2"
    sibling.mkdir()
    (sibling / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(SourceRefused, match="outside the allowed model roots") as caught:
        find_file(f"{root}/{path}", [root])
    assert str(root) in str(caught.value)
    assert "TATKAL_MODEL_ROOTS" in str(caught.value)


def test_a_link_that_leads_out_is_refused_and_one_that_stays_is_followed(root: Path) -> None:
    (root / "out.gguf").symlink_to(root.parent / "secret.gguf")
    (root / "in.gguf").symlink_to(root / "a.gguf")
    (root / "up").symlink_to(root.parent)
    assert find_file(str(root / "in.gguf"), [root]) == root / "a.gguf"
    for path in ("out.gguf", "up/secret.gguf"):
        with pytest.raises(SourceRefused, match=r"leads to '.*secret\.gguf', outside"):
            find_file(str(root / path), [root])
    with pytest.raises(SourceRefused, match="outside"):
        find_directory(str(root / "up"), [root])


def test_a_link_in_a_circle_is_no_file(root: Path) -> None:
    (root / "one").symlink_to(root / "two")
    (root / "two").symlink_to(root / "one")
    with pytest.raises(SourceRefused, match="no regular file"):
        find_file(str(root / "one"), [root])


@pytest.mark.parametrize("path", ["a.gguf", "", "~/a.gguf", "./a.gguf", "/a\0b"])
def test_what_is_no_absolute_path_is_refused(root: Path, path: str) -> None:
    with pytest.raises(SourceRefused):
        find_file(path, [root])


def test_the_wrong_kind_of_thing_is_named(root: Path) -> None:
    with pytest.raises(SourceRefused, match="is a directory"):
        find_file(str(root / "llama"), [root])
    with pytest.raises(SourceRefused, match="is a file"):
        find_directory(str(root / "a.gguf"), [root])
    with pytest.raises(SourceRefused, match="does not exist"):
        find_directory(str(root / "nothing"), [root])


def test_roots_count_where_they_really_lie(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    roots = allowed_roots([link])
    assert roots[0] == root
    assert find_file(str(link / "a.gguf"), roots) == root / "a.gguf"


def test_models_below_the_roots_are_suggested(root: Path) -> None:
    deep = root / "1" / "2" / "3" / "4"
    deep.mkdir(parents=True)
    (deep / "far.gguf").touch()
    assert suggest([root, root.parent / "absent"]) == [str(root / "a.gguf"), str(root / "llama")]
