"""Personal data are found by what makes them valid, and other numbers are left alone."""

from __future__ import annotations

import random

import pytest

from drift.personal_data import (
    find_personal_data,
    passes_luhn,
    passes_mod_97,
    passes_verhoeff,
)


def kinds(text: str) -> set[str]:
    return {kind for kind, _ in find_personal_data(text)}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        # Numbers that the networks give out for tests.
        ("Card 4111 1111 1111 1111.", "card"),
        ("card:5555555555554444", "card"),
        ("378282246310005", "card"),
        ("3782 822463 10005", "card"),
        ("6011-1111-1111-1117", "card"),
        ("Aadhaar: 2341 2341 2346", "aadhaar"),
        ("234123412346", "aadhaar"),
        # The examples of the registry of ISO 13616.
        ("GB29 NWBK 6016 1331 9268 19", "iban"),
        ("DE89370400440532013000", "iban"),
        ("FR14 2004 1010 0505 0001 3M02 606", "iban"),
        ("Write to meera.nair+shop@mail.co.in, please", "email"),
        ("Call +91 98765 43210", "phone"),
        ("+44 20 7946 0958", "phone"),
        ("98765 43210 is mine", "phone"),
        ("My mobile number is 9876543210", "phone"),
        ("(555) 123-4567", "phone"),
    ],
)
def test_what_is_valid_is_found(text: str, kind: str) -> None:
    assert kinds(text) == {kind}


@pytest.mark.parametrize(
    "text",
    [
        "Order 4111 1111 1111 1112",
        "1234567812345670",  # Luhn holds, and no network begins like that
        "0000 0000 0000 0000",
        "2341 2341 2347",
        "1341 2341 2346",
        "GB29 NWBK 6016 1331 9268 18",
        "support@example.com and root@localhost",
        "a@b and @meera and x@y.z",
        "In 2019 there were 1,428,627,663 people; pi is 3.14159265358979",
        "build 20240131120000, hash 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822c",
        "uuid 550e8400-e29b-41d4-a716-446655440000",
        "ISBN 978-3-16-148410-0, PIN 560001, GSTIN 29ABCDE1234F1Z5",
        "Order no. 9876543210 was shipped",
        "10.0.0.1, 192.168.1.255:8080 and 2001:db8::1",
        "```\nfor i in range(1000000007): x[i] = 4294967296\n```",
        "UPI ref 408912345678 of 1 March 2026",
        "Call 1800 11 1363 toll free",
    ],
)
def test_other_numbers_and_addresses_of_nobody_are_left_alone(text: str) -> None:
    assert kinds(text) == set()


def test_two_ways_of_writing_a_number_are_the_same_value() -> None:
    assert set(find_personal_data("4111-1111-1111-1111")) == set(
        find_personal_data("4111 1111 1111 1111")
    )


def test_check_digits_are_those_of_published_examples() -> None:
    assert passes_luhn("79927398713")  # US patent 2,950,048 in its usual example
    assert not any(passes_luhn(f"7992739871{digit}") for digit in (0, 1, 2, 4, 5, 6, 7, 8, 9))
    assert passes_verhoeff("2363")  # 236 has 3
    assert not any(passes_verhoeff(f"236{digit}") for digit in (0, 1, 2, 4, 5, 6, 7, 8, 9))
    assert passes_mod_97("GB82WEST12345698765432")
    assert not passes_mod_97("GB82WEST12345698765423")


def test_a_swap_of_two_digits_is_noticed() -> None:
    draw = random.Random(1)  # noqa: S311
    for _ in range(200):
        digits = "".join(draw.choice("0123456789") for _ in range(11))
        number = next(digits + end for end in "0123456789" if passes_verhoeff(digits + end))
        place = draw.randrange(11)
        first, second = number[place], number[place + 1]
        swapped = number[:place] + second + first + number[place + 2 :]
        assert first == second or not passes_verhoeff(swapped)


def test_few_random_numbers_pass_for_a_card() -> None:
    draw = random.Random(2)  # noqa: S311
    numbers = [str(draw.randrange(10**15, 10**16)) for _ in range(2_000)]
    assert sum("card" in kinds(number) for number in numbers) / len(numbers) < 0.04
