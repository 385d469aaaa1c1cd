"""An artifact of ours -> the same again, or one with another chat template that shares its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from inference.artifact import (
    TOKENIZER,
    BrokenArtifact,
    Progress,
    derive_artifact,
    no_progress,
    open_regular,
    verify,
)
from inference.importers.checkpoint import (
    MAX_TEMPLATE_BYTES,
    check_chat_template,
    with_end_of_turn,
)
from inference.importers.tokenizer import load_tokenizer


def import_artifact(
    artifact: Path,
    root: Path,
    *,
    chat_template: Path | None = None,
    progress: Progress = no_progress,
) -> Path:
    """``artifact``, proven whole, or one under ``root`` that differs in its template alone.

    The weights are shared on disk. End-of-turn tokens that the new template writes end an answer too.

    Raises:
        BrokenArtifact: the artifact is damaged, or the template cannot be read or parsed.
    """
    progress(0, 2, "checking digests")
    manifest = verify(artifact)
    if chat_template is None:
        return artifact
    progress(1, 2, "chat template")
    template = _read_template(chat_template)
    check_chat_template(template)
    with open_regular(artifact / TOKENIZER) as file:
        tokenizer, _ = load_tokenizer(file.read().decode("utf-8"), TOKENIZER)
    eos_ids = with_end_of_turn(manifest.model.eos_token_ids, tokenizer, template)
    model = replace(manifest.model, eos_token_ids=eos_ids)
    return derive_artifact(artifact, root, model=model, chat_template=template)


def _read_template(path: Path) -> str:
    with open_regular(path) as file:
        raw = file.read(MAX_TEMPLATE_BYTES + 1)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenArtifact(path.name, "", "it is not UTF-8.", "Save it as UTF-8.") from error
