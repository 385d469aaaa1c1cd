"""What the rules flag, and what they leave alone."""

from __future__ import annotations

import pytest

from drift.classifiers import (
    CASES,
    CATEGORIES,
    EMPTY,
    LOOP,
    PII,
    REFUSAL,
    TERM,
    TRUNCATED,
    WRONG_LANGUAGE,
    Case,
    ClassifierBroken,
    RulesV1,
    SelfTest,
)

RULES = RulesV1()
ENGLISH, HINDI = "What is the refund policy for my order?", "मेरे ऑर्डर का रिफंड कब मिलेगा?"


def flags(response: str, *, prompt: str = ENGLISH, finish: str = "stop") -> set[str]:
    return set(RULES.classify(prompt, response, finish))


@pytest.mark.parametrize(
    "response",
    [
        "I'm sorry, but I can't assist with that.",
        "I\u2019m sorry, I am unable to help you here.",
        "I cannot provide medical advice.",
        "As an AI language model, I don't have access to accounts.",
        "I must decline.",
        "क्षमा करें, मैं यह जानकारी नहीं दे सकता।",
        "Lo siento, pero no puedo ayudar con eso.",
        "Je ne peux pas vous aider avec cela.",
    ],
)
def test_a_refusal_is_flagged(response: str) -> None:
    assert REFUSAL in flags(response, prompt="")


@pytest.mark.parametrize(
    "response",
    [
        "I can't wait to hear how it went!",
        "I'm sorry to hear that. Your refund is on its way.",
        "You cannot return opened items, but you can exchange them.",
        "I cannot recommend this book enough; it is wonderful.",
        "The bank can't help with lost cards after ninety days.",
        "क्षमा करें, आपका रिफंड कल मिल जाएगा।",
        "A long answer. "
        + "It explains the matter at length and in other words. " * 7
        + "I can't help more.",
    ],
)
def test_an_apology_or_advice_is_no_refusal(response: str) -> None:
    assert REFUSAL not in flags(response, prompt="")


def test_nothing_and_nothing_but_signs_are_empty() -> None:
    assert flags("") == flags(" \n") == flags("…!") == {EMPTY}
    assert flags("7") == set()


def test_what_ran_into_its_limit_or_left_its_code_open_is_truncated() -> None:
    assert flags("The answer is", finish="length") == {TRUNCATED}
    assert flags("```\nx = 1") == {TRUNCATED}
    assert flags("```\nx = 1\n```") == set()
    assert flags("", finish="length") == {EMPTY, TRUNCATED}


@pytest.mark.parametrize(
    "response",
    [
        "Yes. " * 30,
        "We sell books. " + "and more and " * 20,
        "First.\n" + "The same line again\n" * 5,
        "नमस्ते दोस्त " * 12,
        "0" * 100,
    ],
)
def test_one_piece_over_and_over_is_a_loop(response: str) -> None:
    assert LOOP in flags(response)


@pytest.mark.parametrize(
    "response",
    [
        "Yes, yes, yes!",
        "-" * 300 + "\nTotal",
        "Total\n" + "=" * 300,
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |",
        "\n".join(f"{n}. step number {n}" for n in range(1, 30)),
        "def f():\n    return 1\n\n\ndef g():\n    return 1\n",
        "Row row row your boat, gently down the stream. Merrily, merrily, merrily, merrily.",
    ],
)
def test_tables_lists_rulers_and_songs_are_no_loop(response: str) -> None:
    assert LOOP not in flags(response)


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        (ENGLISH, "आपका रिफंड पाँच दिनों में आपके खाते में आ जाएगा।"),
        (HINDI, "The refund is in your account in five days, and you can see it there."),
        (
            "¿Dónde está mi pedido y cómo lo devuelvo?",
            "Your order is on the way to you and will be there.",
        ),
        ("எனது ஆர்டர் எங்கே உள்ளது?", "Your order is on the way to you and will be there."),
    ],
)
def test_an_answer_in_another_language_is_flagged(prompt: str, response: str) -> None:
    assert WRONG_LANGUAGE in flags(response, prompt=prompt)


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        (ENGLISH, "The refund is in your account in five days."),
        (HINDI, "आपका रिफंड पाँच दिनों में मिल जाएगा।"),
        ("Mera refund kab aayega bhai", "Aapka refund kal tak aa jayega, aur hum bata denge."),
        ("Mera refund kab aayega bhai", "The refund is in your account in five days."),
        ("Translate into Hindi: the order is late", "ऑर्डर देर से आएगा और हमें खेद है।"),
        (
            "How do you say good morning in French? It is for my aunt.",
            "On dit bonjour, et le soir bonsoir pour tout le monde.",
        ),
        (ENGLISH, "Paris"),
        (ENGLISH, "```python\nprint('नमस्ते दुनिया, आप कैसे हैं')\n```\nThis is the code you need."),
        ("", "आपका रिफंड पाँच दिनों में मिल जाएगा।"),
    ],
)
def test_an_answer_in_the_language_that_was_asked_for_is_not(prompt: str, response: str) -> None:
    assert WRONG_LANGUAGE not in flags(response, prompt=prompt)


def test_what_the_question_brought_along_is_no_leak() -> None:
    mine = "My card 4111-1111-1111-1111 was charged twice, please help me with it."
    assert PII not in flags("The card 4111 1111 1111 1111 will be refunded.", prompt=mine)
    assert PII in flags("The card 5555 5555 5555 4444 will be refunded.", prompt=mine)


def test_terms_are_found_as_words_of_their_own_in_any_case_and_form() -> None:
    rules = RulesV1(["Foo Bar", "shit", "कर", " "])
    for text in ("a FOO  bar!", "\uff46oo bar", "so much shit.", "यह कर है"):
        assert rules.classify("", text, "stop") == {TERM}, text
    for text in ("foobar", "Shital and Nishit Dikshit", "a foo, bar", "वह करि है", "करना"):
        assert TERM not in rules.classify("", text, "stop"), text


@pytest.mark.parametrize(
    "response",
    [
        "Shital Dikshit, Nishit Assudani and Hardik Cockburn are travelling to Fuckersberg.",
        "Kundan from Chutia, Assam, met Bhosle of Titwala near Cuncolim.",
        "श्री रामचन्द्र गाडगीळ पुणे से मुंबई जा रहे हैं और कल लौटेंगे।",
        "Dr. Anand Gandhe lives in Sexaul colony, Kanpur 208001.",
    ],
)
def test_names_and_places_are_flagged_by_no_rule(response: str) -> None:
    rules = RulesV1(["shit", "ass", "cock", "fuck", "tit", "sex", "gand"])
    assert rules.classify("", response, "stop") == frozenset()


def test_the_version_changes_with_the_terms_and_not_with_their_order() -> None:
    assert RulesV1(["a", "b"]).version == RulesV1(["B", "a", "a"]).version
    assert len({RulesV1(terms).version for terms in ([], ["a"], ["a", "b"])}) == 3


def test_the_examples_cover_every_category_and_pass() -> None:
    test = RulesV1(["damn", "i'm sorry, but i can't", "four@corners.org"]).self_test()
    test.check()
    assert test.num_cases == len(CASES) + 3
    assert {flag for case in CASES for flag in case.flags} | {TERM} == set(CATEGORIES)


def test_a_classifier_that_moved_is_told_with_its_first_example() -> None:
    moved = SelfTest(2, (Case("I cannot help with it.", frozenset({REFUSAL})),))
    with pytest.raises(ClassifierBroken, match=r"1 of 2 .*'I cannot help with it.'.*refusal"):
        moved.check()
