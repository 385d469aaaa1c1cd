"""Tokens to text, one at a time: never half a character, and nothing after a stop string.

What is delivered, put together, is the text of all output tokens decoded at once, cut at the stop string that is
complete first. A character that the last token left incomplete is dropped, not shown as a replacement character.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from inference.engine.token_texts import BYTE_TOKEN, is_silent

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# The start of a character that is still incomplete has at most 3 bytes, and so at most as many tokens.
_MAX_INCOMPLETE_TOKENS = 3


class Detokenizer:
    """The text of one request's output. It keeps a window of a few tokens, whatever the length of the output."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = StopMatcher(stop)
        # Tokens whose text is not all delivered, behind one that gives the decoder its context.
        self._window: list[int] = []
        self._num_delivered = 0
        self._start_behind(prompt_ids)

    @property
    def is_at_start(self) -> bool:
        """Whether nothing stands before the next token that a decoder would look at."""
        return not self._window

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that ``token_id`` makes certain, and whether a stop string is complete.

        A token that is special, negative or beyond the vocabulary has no text. After a stop there is no more text.
        """
        return self._stops.push(self._decode_next(token_id))

    def flush(self) -> str:
        """The rest, once no token follows: a run of bytes, a text that began like a stop string."""
        text = self._decode(self._window)[self._num_delivered :] if self._window else ""
        # The limit on tokens may fall within a character. A true replacement character at the very end goes too: it
        # cannot be told apart, and says nothing.
        text = text.removesuffix(REPLACEMENT)
        self._window.clear()
        self._num_delivered = 0
        delivered, _ = self._stops.push(text)
        return delivered + self._stops.flush()

    def _start_behind(self, prompt_ids: Sequence[int]) -> None:
        # Some decoders drop the space before the very first word. Behind a prompt's last word it belongs to the
        # text; behind a special token, where an answer begins, it does not.
        last = prompt_ids[-1] if prompt_ids else -1
        if is_silent(self._tokenizer, last) or self._is_byte(last):
            return
        text = self._decode([last])
        if not text.endswith(REPLACEMENT):
            self._window = [last]
            self._num_delivered = len(text)

    def _decode_next(self, token_id: int) -> str:
        if is_silent(self._tokenizer, token_id):
            return ""
        self._window.append(token_id)
        # The decoder reads a run of byte tokens as a whole: one bad byte turns the whole run into replacement
        # characters, so that nothing of a run is certain before its end.
        if self._is_byte(token_id):
            return ""
        text = self._decode(self._window)
        is_complete = not text.endswith(REPLACEMENT)
        certain = text if is_complete else text[: -len(REPLACEMENT)]
        delta = certain[self._num_delivered :]
        self._num_delivered = max(self._num_delivered, len(certain))
        self._shrink_window(is_complete)
        return delta

    def _shrink_window(self, is_complete: bool) -> None:
        # Alone, the tokens that stay may give another text than behind those that go, but only up to their last
        # character; and that one is delivered when it is complete, and awaited when it is not.
        num_kept = 1 if is_complete else _MAX_INCOMPLETE_TOKENS
        if len(self._window) > num_kept:
            del self._window[:-num_kept]
            text = self._decode(self._window)
            self._num_delivered = len(text) - (0 if is_complete else len(REPLACEMENT))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _is_byte(self, token_id: int) -> bool:
        return BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None


class StopMatcher:
    """Cuts a growing text at the stop string that is complete first; of several complete at once, the longest.

    So the cut does not depend on how the text is split into pieces. Only the longest end of the text that begins a
    stop string is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that no stop string can claim any more, and whether one is complete."""
        if self._is_stopped or not self._stop:
            return ("" if self._is_stopped else text), self._is_stopped
        text = self._held + text
        found = [
            (text.index(stop) + len(stop), text.index(stop)) for stop in self._stop if stop in text
        ]
        if found:
            self._is_stopped = True
            self._held = ""
            return text[: min(found)[1]], True
        num_held = self._num_claimed(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        return held

    def _num_claimed(self, text: str) -> int:
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
