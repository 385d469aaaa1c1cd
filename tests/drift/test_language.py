"""Languages by script and by common words, and nothing where it is not sure."""

from __future__ import annotations

import pytest

from drift.language import UNKNOWN, detect


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the refund policy for my order?", "en"),
        ("मेरे ऑर्डर का रिफंड कब मिलेगा?", "hi"),
        ("माझी ऑर्डर कुठे आहे आणि ती कधी येईल?", "mr"),
        ("मेरो अर्डर कहाँ छ ?", "ne"),
        ("Mera order kab aayega bhai", "hi-Latn"),
        ("எனது ஆர்டர் எங்கே உள்ளது?", "ta"),
        ("నా ఆర్డర్ ఎక్కడ ఉంది?", "te"),
        ("আমার অর্ডার কোথায়?", "bn"),
        ("ನನ್ನ ಆರ್ಡರ್ ಎಲ್ಲಿದೆ?", "kn"),
        ("എന്റെ ഓർഡർ എവിടെ?", "ml"),
        ("મારો ઓર્ડર ક્યાં છે?", "gu"),
        ("ਮੇਰਾ ਆਰਡਰ ਕਿੱਥੇ ਹੈ?", "pa"),
        ("میرا آرڈر کہاں ہے؟", "ur"),
        ("أين طلبي؟", "ar"),
        ("Où est mon colis et comment le suivre ?", "fr"),
        ("¿Dónde está mi pedido y cómo lo devuelvo?", "es"),
        ("Onde está o meu pedido e como faço para devolver?", "pt"),
        ("Wo ist mein Paket und wie kann ich es zurückgeben?", "de"),
        ("Dov'è il mio pacco e come posso restituire questo?", "it"),
        ("東京はどこですか", "ja"),
        ("我的订单在哪里", "zh"),
        ("Где мой заказ?", "ru"),
        ("Де моє замовлення і коли воно прибуде?", "uk"),  # noqa: RUF001
        ("What does नमस्ते mean in this sentence, and how is it said?", "en"),
        ("इस function का output क्या है, और यह error क्यों आता है?", "hi"),
    ],
)
def test_a_language_is_known_by_its_script_and_its_words(text: str, language: str) -> None:
    assert detect(text) == language


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hi",
        "42",
        "Rajesh Kumar, Varanasi",
        "🙂🙂",
        "OK",
        "```\nwhat is the sum of it\n```",
        "x = y + z",
    ],
)
def test_nothing_is_said_where_it_is_not_sure(text: str) -> None:
    assert detect(text) == UNKNOWN
