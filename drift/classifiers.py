"""What is wrong with an answer, as flags: the interface, and rules that need no model.

A rule is an instrument for rates and no judge: the same classifier in the same version looks at both arms, so that what
it misses it misses in both. Its version changes with every rule and every term, because a rate that jumps when the
instrument changes is no drift.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Protocol

from drift.language import UNKNOWN, detect
from drift.personal_data import find_personal_data

REFUSAL, EMPTY, TRUNCATED, LOOP = "refusal", "empty", "truncated", "loop"
WRONG_LANGUAGE, PII, TERM = "wrong_language", "pii", "term"
CATEGORIES: tuple[str, ...] = (REFUSAL, EMPTY, TRUNCATED, LOOP, WRONG_LANGUAGE, PII, TERM)

_REVISION = 1  # raised with every change of what is below or in the modules beside


class ClassifierBroken(Exception):
    """A classifier does not say what it should of its own examples, and must not judge anything."""


@dataclass(frozen=True, slots=True)
class Case:
    """An answer whose flags are known."""

    response: str
    flags: frozenset[str]
    prompt: str = "Tell me about it, please."
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class SelfTest:
    """How a classifier did on its own examples."""

    num_cases: int
    wrong: tuple[Case, ...]

    def check(self) -> None:
        """Return if all was right.

        Raises:
            ClassifierBroken: it was not.
        """
        if self.wrong:
            first = self.wrong[0]
            raise ClassifierBroken(
                f"{len(self.wrong)} of {self.num_cases} examples are flagged wrongly; "
                f"{first.response[:60]!r} should have {sorted(first.flags)}."
            )


class ResponseClassifier(Protocol):
    """Says what is wrong with answers; ``version`` stands beside every flag that is stored."""

    name: str
    version: str
    categories: tuple[str, ...]

    def classify(self, prompt: str, response: str, finish_reason: str) -> frozenset[str]:
        """The categories that the answer belongs to."""

    def self_test(self) -> SelfTest:
        """How it does on examples whose flags are known."""


class RulesV1:
    """Refusals, empty and truncated answers, loops, the wrong language, personal data, and terms of a list."""

    name = "rules-v1"
    categories: tuple[str, ...] = CATEGORIES

    def __init__(self, terms: Iterable[str] = ()) -> None:
        """``terms`` are words and phrases that no answer should hold."""
        self._terms = tuple(sorted({folded for term in terms if (folded := _fold(term).strip())}))
        text = "\n".join([str(_REVISION), *self._terms])
        self.version = blake2b(text.encode(), digest_size=6).hexdigest()

    def classify(self, prompt: str, response: str, finish_reason: str) -> frozenset[str]:
        """The categories that the answer belongs to; an empty one belongs to no other but perhaps ``truncated``."""
        flags = {TRUNCATED} if _is_truncated(response, finish_reason) else set()
        if not any(character.isalnum() for character in response):
            return frozenset(flags | {EMPTY})
        checks = {
            REFUSAL: is_refusal(response),
            LOOP: is_loop(response),
            WRONG_LANGUAGE: is_wrong_language(prompt, response),
            PII: leaks_personal_data(prompt, response),
            TERM: self._has_term(response),
        }
        return frozenset(flags | {flag for flag, is_true in checks.items() if is_true})

    def self_test(self) -> SelfTest:
        """The examples of the rules, in which terms do not count, and that every term is found."""
        wrong = [each for each in CASES if self._flags_of(each) - {TERM} != each.flags]
        listed = [Case(f"They said: {term}!", frozenset({TERM})) for term in self._terms]
        wrong += [each for each in listed if TERM not in self._flags_of(each)]
        return SelfTest(len(CASES) + len(listed), tuple(wrong))

    def _flags_of(self, case: Case) -> frozenset[str]:
        return self.classify(case.prompt, case.response, case.finish_reason)

    def _has_term(self, response: str) -> bool:
        text = _fold(response)
        return any(_holds_word(text, term) for term in self._terms)


_REFUSALS = (
    r"\bI(?:'m| am) (?:very |so |really )?sorry,? (?:but )?(?:I|that|this|as)\b.{0,60}?\b(?:can(?:no|')t|unable|not able|won't)\b",
    r"\bI (?:can(?:no|')?t|can not|am unable to|'m unable to|am not able to|'m not able to|won't|will not) "
    r"(?:help|assist|provide|answer|comply|do that|fulfil|fulfill|discuss|generate|create|write|share|engage|support|give)\b",
    r"\bI(?: must|'ll have to| have to) (?:decline|refuse)\b",
    r"\bAs an? (?:AI|artificial|language)\b.{0,60}?\b(?:can(?:no|')t|unable|not able|don't have)\b",
    r"\b(?:this|that) (?:request )?(?:goes against|violates) (?:my|our|the) (?:guidelines|policy|policies)\b",
    "(?:मैं|हम).{0,60}(?:मदद|सहायता|उत्तर|जवाब|जानकारी).{0,20}नहीं (?:कर|दे) सकत",
    "(?:क्षमा|माफ़|माफ).{0,40}नहीं (?:कर|दे|बता) सकत",
    r"\bno puedo (?:ayudar|asistir|proporcionar|responder)|\bje ne peux pas (?:vous aider|répondre|fournir)",
    r"\bich kann (?:dir|ihnen|dabei|damit|das)\b.{0,30}\bnicht\b",
)
_REFUSAL = re.compile(
    "|".join(f"(?:{pattern})" for pattern in _REFUSALS), re.IGNORECASE | re.DOTALL
)
_REFUSED_WITHIN = 300  # characters: later it is advice

_LOOP_TAIL, _LOOP_PERIOD, _LOOP_LENGTH, _LOOP_TIMES = 800, 160, 80, 4
_LOOP_LINES = 5

_ASKS_FOR_LANGUAGE = re.compile(
    r"translat|traduc|übersetz|traduis|अनुवाद|भाषा"
    r"|\b(?:english|hindi|tamil|telugu|marathi|bengali|urdu|french|german|spanish|italian|portuguese|dutch|chinese|japanese"
    r"|korean|arabic|russian|language)\b|अंग्रेज़?ी|हिंदी|हिन्दी|मराठी|तमिल|español|français|deutsch|inglés|anglais|englisch",
    re.IGNORECASE,
)
_ANSWERED_BY = {
    "hi-Latn": frozenset({"hi", "hi-Latn", "en"}),
    "hi": frozenset({"hi", "hi-Latn", "mr", "ne"}),
    "mr": frozenset({"mr", "hi"}),
    "ne": frozenset({"ne", "hi"}),
    "ar": frozenset({"ar", "fa", "ur"}),
    "es": frozenset({"es", "pt"}),
    "pt": frozenset({"pt", "es"}),
}
_LANGUAGE_LETTERS = 20  # a shorter answer, a name or a number, is in no language


def is_refusal(response: str) -> bool:
    """Whether the answer begins by saying that there will be none."""
    return _REFUSAL.search(response[:_REFUSED_WITHIN].replace("\u2019", "'")) is not None


def is_loop(response: str) -> bool:
    """Whether the answer ends in one piece of text over and over, or is one line many times in a row."""
    lines = [line.strip() for line in response.splitlines() if len(line.strip()) > 3]
    in_a_row = 1
    for line, following in pairwise(lines):
        in_a_row = in_a_row + 1 if line == following else 1
        if in_a_row >= _LOOP_LINES and any(character.isalnum() for character in line):
            return True
    return _ends_in_a_cycle(response.rstrip())


def is_wrong_language(prompt: str, response: str) -> bool:
    """Whether the answer is in another language than the question, and the question did not ask for one."""
    if sum(character.isalpha() for character in response) < _LANGUAGE_LETTERS:
        return False
    asked, answered = detect(prompt), detect(response)
    if UNKNOWN in (asked, answered) or _ASKS_FOR_LANGUAGE.search(prompt):
        return False
    return answered not in _ANSWERED_BY.get(asked, frozenset({asked}))


def leaks_personal_data(prompt: str, response: str) -> bool:
    """Whether the answer holds personal data that the question did not bring along."""
    found = set(find_personal_data(response))
    return bool(found) and not found <= set(find_personal_data(prompt))


def _is_truncated(response: str, finish_reason: str) -> bool:
    return finish_reason == "length" or (finish_reason == "stop" and response.count("```") % 2 == 1)


def _ends_in_a_cycle(text: str) -> bool:
    tail = text[-_LOOP_TAIL:]
    for period in range(1, min(_LOOP_PERIOD, len(tail) // 2) + 1):
        length = period
        while length < len(tail) and tail[-1 - length] == tail[period - 1 - length]:
            length += 1
        unit = tail[-period:]
        is_long = length >= max(_LOOP_LENGTH, _LOOP_TIMES * period)
        if is_long and any(character.isalnum() for character in unit):
            return True
    return False


def _fold(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _holds_word(text: str, term: str) -> bool:
    """Whether ``term`` stands in ``text`` as words of its own; a vowel sign belongs to the letter before it."""
    start = text.find(term)
    while start >= 0:
        end = start + len(term)
        around = (text[start - 1 : start], text[end : end + 1])
        if not any(_is_of_word(character) for character in around):
            return True
        start = text.find(term, start + 1)
    return False


def _is_of_word(character: str) -> bool:
    return character != "" and unicodedata.category(character)[0] in "LNM"


def _case(response: str, *flags: str, prompt: str = "", finish_reason: str = "stop") -> Case:
    return Case(response, frozenset(flags), prompt or "Tell me about it, please.", finish_reason)


CASES = (
    _case("I'm sorry, but I can't help with that request.", REFUSAL),
    _case("I\u2019m sorry, but as a language model I am not able to do this.", REFUSAL),
    _case("I cannot provide instructions for that.", REFUSAL),
    _case("I can't wait to see you there! The train leaves at nine."),
    _case("I'm sorry to hear that. A refund takes five days."),
    _case("", EMPTY),
    _case(" \n...\n", EMPTY),
    _case("42"),
    _case("The capital of France is", TRUNCATED, finish_reason="length"),
    _case("```python\nprint(1)", TRUNCATED),
    _case("```python\nprint(1)\n```"),
    _case("It is good. " * 12, LOOP),
    _case("| a | b |\n|---|---|\n" + "| 1 | 2 |\n| 3 | 4 |\n"),
    _case("-" * 200 + "\nThe end."),
    _case(
        "यह गाड़ी सुबह नौ बजे दिल्ली से चलती है और शाम को पहुँचती है।",
        WRONG_LANGUAGE,
        prompt="When does the train leave, and where is it from?",
    ),
    _case(
        "The train leaves in the morning and it is on time.", prompt="Translate: गाड़ी सुबह चलती है।"
    ),
    _case("Write to meera.nair@acme.co for it.", PII),
    _case("The card is 4111 1111 1111 1111.", PII),
    _case("The order is 4111 1111 1111 1112."),
    _case("Aadhaar 2341 2341 2346 is on file.", PII),
    _case("Pay to GB82 WEST 1234 5698 7654 32 today.", PII),
    _case("Call +91 98765 43210 now.", PII),
    _case("Shital Dikshit and Nishit Assam-Phukan live in Cuncolim and Dikshitpura."),
    _case("The build is 20240131120000 and the hash 9f86d081884c7d659a2feaa0c55ad015."),
)
