"""Personal data in a text: numbers with their check digits, addresses, telephone numbers.

A number counts only where its check digit, its length and its first digits say what it is: of 16 digits drawn at random
one in ten has the right last digit, and one in fifty the right beginning as well. A number in a fenced block of code
counts all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

# Luhn: ISO/IEC 7812-1, annex B. First digits and lengths of the networks: ISO/IEC 7812 registrations in common use.
_CARD = re.compile(
    r"(?<![\w.-])(?:\d{4}([ -]?)\d{4}\1\d{4}\1\d{1,7}|\d{4}([ -]?)\d{6}\2\d{5})(?![\w-]|\.\d)"
)
_NETWORKS = (
    (re.compile(r"4"), (13, 16, 19)),
    (re.compile(r"5[1-5]|2(?:22[1-9]|2[3-9]|[3-6]|7[01]|720)"), (16,)),
    (re.compile(r"3[47]"), (15,)),
    (re.compile(r"6(?:011|4[4-9]|5)|60|81|82|508"), (16,)),
)
# Aadhaar: twelve digits, the first from 2 to 9, the last by Verhoeff (1969), as the UIDAI gives them out.
_AADHAAR = re.compile(r"(?<![\w.-])[2-9]\d{3}([ -]?)\d{4}\1\d{4}(?![\w-]|\.\d|[ ]\d{4})")
# IBAN: ISO 13616, check digits by ISO 7064 mod 97-10.
_IBAN = re.compile(r"(?<!\w)[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?!\w)")
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,4}[A-Za-z]{2,24}(?!\w)")
# Names that RFC 2606 and RFC 6761 keep for examples belong to nobody.
_NOBODY = re.compile(
    r"@(?:[\w-]+\.)*(?:example\.(?:com|net|org)|[\w-]+\.(?:example|test|invalid|local))$"
)
_PHONE = re.compile(
    r"(?<![\w.+-])(?:"
    r"\+\d{1,3}[ -]?(?:\(\d{1,4}\)[ -]?)?\d(?:[ -]?\d){6,11}"  # with its country
    r"|(?:0|91[ -]?)?[6-9]\d{4}[ -]\d{5}"  # as Indian mobile numbers are grouped
    r"|\(\d{3}\) ?\d{3}-\d{4}"
    r")(?![\w-]|\.\d)"
)
_CALL = re.compile(
    r"(?:phone|mobile|whatsapp|call|tel\.?|contact|फ़?ोन|फोन|मोबाइल)\W{0,3}(?:(?:no|number|is|at|on|नंबर)\W{0,3}){0,2}"
    r"((?:0|91)?[6-9]\d{9}|\d{3}[ -]\d{3}[ -]\d{4})(?!\d)",
    re.IGNORECASE,
)

_VERHOEFF_MULTIPLY = tuple(
    tuple(int(digit) for digit in row)
    for row in (
        *("0123456789", "1234067895", "2340178956", "3401289567", "4012395678"),
        *("5987604321", "6598710432", "7659821043", "8765932104", "9876543210"),
    )
)
_VERHOEFF_PERMUTE = tuple(
    tuple(int(digit) for digit in row)
    for row in (
        *("0123456789", "1576283094", "5803796142", "8916043527"),
        *("9453126870", "4286573901", "2793806415", "7046913258"),
    )
)


def find_personal_data(text: str) -> Iterator[tuple[str, str]]:
    """Each kind and value that ``text`` holds; values without spaces and dashes, so that two ways of writing are equal."""
    for kind, pattern, is_valid in _KINDS:
        for found in pattern.finditer(text):
            value = found[found.lastindex] if kind == "called" and found.lastindex else found[0]
            compact = re.sub(r"[\s()-]", "", value)
            if is_valid(compact):
                yield ("phone" if kind == "called" else kind), compact


def passes_luhn(digits: str) -> bool:
    """Whether the last digit fits the others."""
    doubled = (int(d) * (2 if place % 2 else 1) for place, d in enumerate(reversed(digits)))
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


def passes_verhoeff(digits: str) -> bool:
    """Whether the last digit fits the others."""
    check = 0
    for place, digit in enumerate(reversed(digits)):
        check = _VERHOEFF_MULTIPLY[check][_VERHOEFF_PERMUTE[place % 8][int(digit)]]
    return check == 0


def passes_mod_97(iban: str) -> bool:
    """Whether the two check digits behind the country fit the rest."""
    moved = iban[4:] + iban[:4]
    return int("".join(str(int(character, 36)) for character in moved)) % 97 == 1


def _is_card(digits: str) -> bool:
    if len(set(digits)) == 1:
        return False
    is_issued = any(start.match(digits) and len(digits) in sizes for start, sizes in _NETWORKS)
    return is_issued and passes_luhn(digits)


def _is_iban(text: str) -> bool:
    return 15 <= len(text) <= 34 and passes_mod_97(text)


def _is_somebody(address: str) -> bool:
    return not _NOBODY.search(address)


def _is_phone(digits: str) -> bool:
    number = digits.removeprefix("+")
    return len(set(number)) > 2


_KINDS: tuple[tuple[str, re.Pattern[str], Callable[[str], bool]], ...] = (
    ("card", _CARD, _is_card),
    ("aadhaar", _AADHAAR, passes_verhoeff),
    ("iban", _IBAN, _is_iban),
    ("email", _EMAIL, _is_somebody),
    ("phone", _PHONE, _is_phone),
    ("called", _CALL, _is_phone),
)
