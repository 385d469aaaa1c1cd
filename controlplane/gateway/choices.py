"""The choices of one answer: rows of several interleaved streams, put together again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controlplane.gateway.logprobs import Alignment, PlacedToken
from inference.protocol import Finished, FinishReason, TokenRow


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of one choice: some text, the tokens that it begins, and with the last piece how the choice ended."""

    index: int
    text: str
    tokens: tuple[PlacedToken, ...] = ()
    finished: Finished | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What arrived at once, a piece for each choice it belongs to; on the last one, what the whole answer used."""

    pieces: tuple[Piece, ...]
    finished: Finished | None = None


class Choices:
    """What has come of each of ``n`` choices."""

    def __init__(self, n: int, *, with_logprobs: bool) -> None:
        self._alignments = [Alignment() for _ in range(n)] if with_logprobs else []
        self._finishes: dict[int, Finished] = {}
        self._n = n

    @property
    def finished(self) -> Finished | None:
        """The end of the whole answer, once every choice has ended."""
        if len(self._finishes) < self._n:
            return None
        return merge_finishes([self._finishes[index] for index in range(self._n)])

    def take(self, rows: Sequence[TokenRow]) -> Delta:
        """The rows as pieces, in the order in which the choices appear among them; none may be a failure."""
        by_choice: dict[int, list[TokenRow]] = {}
        for row in rows:
            by_choice.setdefault(row.choice, []).append(row)
        pieces = tuple([self._piece(index, each) for index, each in by_choice.items()])
        return Delta(pieces, self.finished)

    def _piece(self, index: int, rows: Sequence[TokenRow]) -> Piece:
        text = "".join([row.text for row in rows])
        finished = rows[-1].finish
        if finished is not None:
            self._finishes[index] = finished
        if not self._alignments:
            return Piece(index, text, finished=finished)
        alignment = self._alignments[index]
        tokens = [token for row in rows for token in alignment.push(row.text, row.logprob)]
        if finished is not None:
            tokens += alignment.finish(finished.reason)
        return Piece(index, text, tuple(tokens), finished)


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """All pieces of an answer as one whole piece for each choice, in order."""
    by_choice: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_choice.setdefault(piece.index, []).append(piece)
    return [
        Piece(
            index,
            "".join([piece.text for piece in parts]),
            tuple([token for piece in parts for token in piece.tokens]),
            parts[-1].finished,
        )
        for index, parts in sorted(by_choice.items())
    ]


def merge_finishes(finishes: Sequence[Finished]) -> Finished:
    """The end of an answer from the ends of its choices, which share one prompt.

    The prompt counts once, what was generated for all. One choice that was cut off makes the answer one that was.
    """
    if len(finishes) == 1:
        return finishes[0]
    is_cut = any(each.reason is FinishReason.LENGTH for each in finishes)
    return Finished(
        FinishReason.LENGTH if is_cut else FinishReason.STOP,
        prompt_tokens=finishes[0].prompt_tokens,
        completion_tokens=sum(each.completion_tokens for each in finishes),
        queue_s=min(each.queue_s for each in finishes),
        first_token_s=min(each.first_token_s for each in finishes),
        total_s=max(each.total_s for each in finishes),
        engine_s=sum(each.engine_s for each in finishes),
        cached_tokens=max(each.cached_tokens for each in finishes),
    )
