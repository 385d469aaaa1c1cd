"""Rows of several choices become pieces of each, and one end of the whole answer."""

from __future__ import annotations

from controlplane.gateway.choices import Choices, Piece, join_pieces, merge_finishes
from inference.protocol import Finished, FinishReason, TokenLogprob, TokenRow

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def finished(reason: FinishReason = STOP, tokens: int = 2, **changes: float) -> Finished:
    values = {"queue_s": 0.1, "first_token_s": 0.2, "total_s": 0.3, **changes}
    return Finished(reason, 7, tokens, **values)  # type: ignore[arg-type]


def row(choice: int, seq: int, text: str, finish: Finished | None = None) -> TokenRow:
    return TokenRow("r", 1, seq, text, finish, choice=choice, logprob=TokenLogprob(text, -0.5))


def test_rows_become_a_piece_of_each_choice() -> None:
    choices = Choices(3, with_logprobs=False)
    delta = choices.take([row(1, 0, "a"), row(0, 0, "x"), row(1, 1, "b")])

    assert delta.pieces == (Piece(1, "ab"), Piece(0, "x"))
    assert delta.finished is None


def test_an_answer_ends_with_its_last_choice() -> None:
    choices = Choices(2, with_logprobs=False)

    assert choices.take([row(1, 0, "a", finished())]).finished is None
    assert choices.take([row(0, 0, "b")]).finished is None
    delta = choices.take([row(0, 1, "c", finished(LENGTH, 5))])

    assert delta.finished == merge_finishes([finished(LENGTH, 5), finished()])
    assert delta.pieces[0].finished == finished(LENGTH, 5)


def test_the_prompt_counts_once_and_what_was_generated_for_all() -> None:
    merged = merge_finishes(
        [
            finished(STOP, 3, queue_s=0.2, engine_s=1.0, cached_tokens=4),
            finished(LENGTH, 5, first_token_s=0.1, total_s=0.9, engine_s=0.5, cached_tokens=6),
        ]
    )

    assert (merged.prompt_tokens, merged.completion_tokens) == (7, 8)
    assert (merged.queue_s, merged.first_token_s, merged.total_s) == (0.1, 0.1, 0.9)
    assert (merged.engine_s, merged.cached_tokens) == (1.5, 6)
    assert merged.reason is LENGTH


def test_one_choice_ends_as_it_says() -> None:
    assert merge_finishes([finished(STOP, 3)]) == finished(STOP, 3)
    assert merge_finishes([finished(STOP), finished(STOP)]).reason is STOP


def test_each_choice_has_its_own_tokens() -> None:
    choices = Choices(2, with_logprobs=True)
    delta = choices.take([row(0, 0, "a"), row(1, 0, "b"), row(0, 1, "c")])

    assert [[each.logprob.token for each in piece.tokens] for piece in delta.pieces] == [
        ["a", "c"],
        ["b"],
    ]
    assert [each.offset for piece in delta.pieces for each in piece.tokens] == [0, 1, 0]


def test_pieces_join_in_the_order_of_the_choices() -> None:
    joined = join_pieces(
        [Piece(1, "a"), Piece(0, "x"), Piece(1, "b", (), finished()), Piece(0, "", (), finished())]
    )

    assert joined == [Piece(0, "x", (), finished()), Piece(1, "ab", (), finished())]
