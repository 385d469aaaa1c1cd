"""Which language a text is in: by its script, and in Latin script by its commonest words.

No model and no data file. It says nothing where it is not sure: a segment without a language is better than a wrong one.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

UNKNOWN = ""
MIN_HITS = 2  # common words of a language, or it is not named
MIN_LETTERS = 2

# First code point, last one, language. Where a script serves several languages, the commonest; see _NARROW.
_SCRIPTS = (
    (0x0370, 0x03FF, "el"),
    (0x0400, 0x052F, "ru"),
    (0x0590, 0x05FF, "he"),
    (0x0600, 0x06FF, "ar"),
    (0x0750, 0x077F, "ar"),
    (0x0900, 0x097F, "hi"),
    (0x0980, 0x09FF, "bn"),
    (0x0A00, 0x0A7F, "pa"),
    (0x0A80, 0x0AFF, "gu"),
    (0x0B00, 0x0B7F, "or"),
    (0x0B80, 0x0BFF, "ta"),
    (0x0C00, 0x0C7F, "te"),
    (0x0C80, 0x0CFF, "kn"),
    (0x0D00, 0x0D7F, "ml"),
    (0x0D80, 0x0DFF, "si"),
    (0x0E00, 0x0E7F, "th"),
    (0x3040, 0x30FF, "ja"),
    (0x4E00, 0x9FFF, "zh"),
    (0xAC00, 0xD7AF, "ko"),
)
# Of the language of a script: what tells another one of the same script, by letters or words.
_NARROW: dict[str, tuple[tuple[str, re.Pattern[str]], ...]] = {
    "ar": (("ur", re.compile("[ٹڈڑںے]")), ("fa", re.compile("[پچگژ]"))),
    "hi": (
        ("mr", re.compile(r"(?:^|\s)(?:आहे|आहेत|आणि|नाही|मला|काय|कसे|होते)(?=[\s,।.?!]|$)")),
        ("ne", re.compile(r"(?:^|\s)(?:छ|छन्|हुन्छ|गर्न|तपाईं|छैन)(?=[\s,।.?!]|$)")),
    ),
    "ru": (("uk", re.compile("[іїєґІЇЄҐ]")),),
}
_COMMON: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "en": "the of and is are was to in that it you for on with this be what how my can your i do does please have "
        "from not or an at as by which when where who why will would should could me we they there its about",
        "es": "el la los las de que y en un una es son por con para no se su como más pero qué cómo está mi muy lo al del",
        "fr": "le la les de des et est un une que pour dans avec sur pas ce qui je vous nous plus mais comment du au aux mon",
        "de": "der die das und ist nicht ein eine zu den mit von für auf im ich sie wie was dem wird sind es auch wir kann",
        "pt": "o os as de que e do da em um uma é não para com por se como mais mas você são meu minha dos das ao no na",
        "it": "il lo la gli di che e un una è non per con come più sono si del della nel mi cosa questo anche al ho",
        "nl": "de het een en van is in dat op te niet met voor zijn ik je hoe wat aan er maar ook mijn kan naar",
        "id": "yang dan di ke dari ini itu untuk dengan tidak adalah saya anda apa bagaimana pada akan ada bisa juga",
        # Hindi as it is typed on an English keyboard.
        "hi-Latn": "hai hain kya ka ki ke ko se mein nahi nahin aur kaise mera meri mujhe kyun kab kahan tum aap hum ho raha "
        "rahi tha thi karna chahiye bhi koi kuch accha batao",
    }.items()
}
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|https?://\S+", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]+")


def detect(text: str) -> str:
    """The language's code, ``hi`` or ``hi-Latn``, or UNKNOWN. Code and addresses do not count."""
    text = unicodedata.normalize("NFC", _CODE.sub(" ", text[:4_000]))
    counts = Counter(
        _script_of(character)
        for character in text
        if unicodedata.category(character)[0] in "LM"  # a vowel sign is worth a vowel
    )
    if sum(counts.values()) < MIN_LETTERS:
        return UNKNOWN
    if counts["ja"]:
        counts["ja"] += counts.pop("zh", 0)
    script, num_letters = counts.most_common(1)[0]
    if 2 * num_letters <= sum(counts.values()) or script == UNKNOWN:
        return UNKNOWN
    if script == "Latn":
        return _by_common_words(text)
    return next((name for name, sign in _NARROW.get(script, ()) if sign.search(text)), script)


def _script_of(character: str) -> str:
    code = ord(character)
    if code < 0x0250 or 0x1E00 <= code < 0x1F00:
        return "Latn"
    return next((name for first, last, name in _SCRIPTS if first <= code <= last), UNKNOWN)


def _by_common_words(text: str) -> str:
    words = _WORD.findall(text.lower())
    hits = {name: sum(word in common for word in words) for name, common in _COMMON.items()}
    (best, most), (_, second) = sorted(hits.items(), key=lambda hit: -hit[1])[:2]
    return best if most >= MIN_HITS and most > second else UNKNOWN
