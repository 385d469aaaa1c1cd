"""Questions of several topics in several languages, each asked once: the same numbers always give the same questions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

CITIES = ("Paris", "Delhi", "Madrid", "Berlin", "Mumbai", "Lima", "Rome", "Cairo", "Oslo", "Kyoto")
# In each language one question of each topic, with a place for a city and one for a number.
TEXTS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "travel": "What should I see in {city} when I have only {number} hours and not much money?",
        "billing": "Why is there a charge of {number} dollars on the bill of my hotel in {city}?",
        "weather": "How warm is it in {city} in the evening when it is {number} degrees at noon?",
    },
    "es": {
        "travel": "¿Qué puedo ver en {city} cuando tengo {number} horas y no mucho dinero para el viaje?",
        "billing": "¿Por qué hay un cargo de {number} dólares en la cuenta del hotel de {city}?",
        "weather": "¿Qué tiempo hace por la tarde en {city} cuando hay {number} grados por la mañana?",
    },
    "de": {
        "travel": "Was kann ich in {city} sehen, wenn ich nur {number} Stunden und nicht viel Geld habe?",
        "billing": "Warum ist eine Summe von {number} Dollar auf der Rechnung für das Hotel in {city}?",
        "weather": "Wie warm ist es am Abend in {city}, wenn es am Mittag {number} Grad hat?",
    },
    "hi": {
        "travel": "{city} में {number} घंटे हों और पैसे कम हों तो मुझे क्या देखना चाहिए?",
        "billing": "{city} के होटल के बिल में {number} रुपये क्यों जोड़े गए हैं?",
        "weather": "{city} में दोपहर को {number} डिग्री हो तो शाम को मौसम कैसा है?",
    },
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question; whoever answers is told the topic, and has to see the language."""

    text: str
    lang: str
    topic: str

    @property
    def metadata(self) -> dict[str, str]:
        """What a caller sends along."""
        return {"topic": self.topic}


def ask_in_turn(shares: Mapping[str, int], *, seed: int = 0) -> Iterator[Question]:
    """Endless questions; of every ``sum(shares.values())`` in a row each language has its share, in a random order."""
    drawn = random.Random(seed)  # noqa: S311 (an order of questions, no secret)
    numbers = itertools.count(2)
    turns = [lang for lang, share in shares.items() for _ in range(share)]
    while True:
        drawn.shuffle(turns)
        for lang in turns:
            topic = drawn.choice(sorted(TEXTS[lang]))
            number = next(numbers)
            text = TEXTS[lang][topic].format(city=drawn.choice(CITIES), number=number)
            yield Question(text, lang, topic)
