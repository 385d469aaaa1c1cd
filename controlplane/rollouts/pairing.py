"""When two halves make a pair, what is known then, and which segments it belongs to."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from difflib import SequenceMatcher
from hashlib import blake2b

from drift.language import detect
from drift.segments import length_band
from inference.protocol import COPY_RUN_S, COPY_WAIT_S, Answer, GenerateRequest

COMPARED, FAILED, UNOBSERVED = "compared", "failed", "unobserved"
GIVE_UP_AFTER_S = 15.0  # behind the last moment at which a copy may be answered
MAX_LABEL = 64
MAX_WORDS = 400  # of each answer, that similarity looks at

SLOT_LOST, LATE, LOST = "slot_lost", "late", "lost"
# Incumbents' ends that tell nothing of a version: the caller, the gateway, the queue or an operator ended the request.
_NOBODYS_FAULT = frozenset(
    {
        *("cancelled", "server_shutting_down", "gateway_lost", "reader_too_slow", "request_lost"),
        *("stream_interrupted", "stream_gap", "version_rolled_back"),
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a pair tells of the candidate; ``reason`` says more where it has no answer."""

    state: str
    reason: str = ""


def judge_halves(incumbent: Answer, candidate: Answer) -> Finding:
    """What both halves tell: an end without an answer counts against whoever was dispatched."""
    if incumbent.outcome in _NOBODYS_FAULT:
        return Finding(UNOBSERVED, incumbent.outcome)
    if candidate.dropped:
        return Finding(UNOBSERVED, candidate.dropped)
    return Finding(COMPARED) if candidate.is_ok else Finding(FAILED, candidate.outcome)


def judge_alone(incumbent: Answer, found: str) -> Finding:
    """What it tells that a copy's half never came, by how far the copy was found to be (``Queue.give_up_copy``)."""
    if incumbent.outcome in _NOBODYS_FAULT:
        return Finding(UNOBSERVED, incumbent.outcome)
    if found == "dispatched":
        return Finding(FAILED, SLOT_LOST)
    return Finding(UNOBSERVED, LATE if found == "waiting" else LOST)


def gives_up_at(incumbent: Answer, request: GenerateRequest) -> float:
    """When a copy's half is not waited for any longer, in epoch seconds."""
    run_s = min(request.deadline_s, COPY_RUN_S)
    return incumbent.at + COPY_WAIT_S + run_s + GIVE_UP_AFTER_S


def differ(one: Answer, other: Answer) -> bool:
    """Whether the answers are not the same to the last character, or ended otherwise."""
    return (one.outcome, one.text, one.finish_reason) != (
        *(other.outcome, other.text, other.finish_reason),
    )


def similarity(one: str, other: str) -> float:
    """The share of equal words in order, from 0 to 1."""
    words = (one.split()[:MAX_WORDS], other.split()[:MAX_WORDS])
    return 1.0 if words[0] == words[1] else SequenceMatcher(None, *words, autojunk=False).ratio()


def prompt_text(request: GenerateRequest) -> str:
    """What was asked, as text: the prompt, or JSON of its messages or token ids."""
    if request.prompt is not None:
        return request.prompt
    if request.messages is None:
        return json.dumps(request.prompt_token_ids)
    turns = [{"role": turn.role, "content": turn.content} for turn in request.messages]
    return json.dumps(turns, ensure_ascii=False)


def question(request: GenerateRequest) -> str:
    """What the user said last: a system prompt is everybody's, and its language nobody's."""
    said = [turn.content for turn in request.messages or () if turn.role == "user"]
    return said[-1] if said else request.prompt or ""


def digest(rollout: str, request: GenerateRequest) -> str:
    """The same for repeats of a prompt within a rollout: case, spacing and forms of characters do not count."""
    parts = [part for turn in request.messages or () for part in (turn.role, turn.content)]
    folded = [_fold(part) for part in parts] or [_fold(prompt_text(request))]
    text = "\x00".join(folded).encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=12, key=rollout.encode()[:64]).hexdigest()


def segments_of(request: GenerateRequest) -> dict[str, str]:
    """The value of each key: ``topic``, ``tenant`` and ``tags.*`` as the caller tells them, language and length as found."""
    told = {
        key.strip(): value.strip()
        for key, value in request.metadata.items()
        if 0 < len(value.strip()) <= MAX_LABEL and 0 < len(key.strip()) <= MAX_LABEL
    }
    found = {
        "lang": told.get("lang") or detect(question(request)),
        "length_band": length_band(len(prompt_text(request))),
        **{key: told[key] for key in ("topic", "tenant") if key in told},
        **{f"tags.{key}": value for key, value in told.items()},
    }
    return {key: value for key, value in sorted(found.items()) if value}


def _fold(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
