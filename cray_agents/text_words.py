"""Words of a text: equal for texts that differ only in case, spaces and punctuation.

    "What's  2+3 ?" -> whats 2 + 3          "well-known" -> well known        "1,000.0" -> 1000.0
    "x = -5" -> x = - 5                     "23" -> 23                        "2²" -> 2 ^ 2

Numbers and operators are not punctuation: `2+3`, `23`, `-5` and `5` are four texts. Some signs may
be either (- / * . ! and brackets). They count beside numbers or single letters, as in a formula.
Texts that `is_long` accepts are also compared by the similarity of their sets of 5-grams.
This module alone defines equal inputs. Read next: tasks/text_index.py, which finds them.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

ENOUGH = 10  # words (not numbers, not signs) that a text needs to be compared by similarity
GRAM = 5  # words in a row that make a member of a text's set
SIMILAR = 0.8  # Jaccard similarity of two sets from which on the texts are the same input

_WORD = r"[^\W\d_]+"
_NUMBER = r"\d+(?:[.:]\d+)*|(?<![\w.])\.\d+"
_ASCII = re.compile(rf"{_NUMBER}|[a-z]+|[^\s\da-z]")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_APOSTROPHE = re.compile(r"(?<=[^\W\d_])['’](?=[^\W\d_])")
_RAISED = re.compile(r"[⁺⁻]?[⁰¹²³⁴-⁹]+")
_OTHER_NUMBER = re.compile(r"[¼-¾⅐-⅟↉①-⓿❶-➓㈠-㊿]")  # ½, ①: a number of its own
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff]")
_UNSPACED = re.compile(  # scripts without spaces: each sign is a word
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff])"
)
_SAME = str.maketrans({
    "−": "-", "‐": "-", "‑": "-", "‒": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*",
    "÷": "/", "∕": "/", "⁄": "/", "≠": "!=", "≤": "<=", "≥": ">=", "’": "'", "‘": "'",
})  # fmt: skip

_ALWAYS = frozenset("+=<>^%")  # operators in any place
_BETWEEN = frozenset("*/|&~")  # operators only between operands
_ARTICLES = ("a", "i")
_BRACKETS = frozenset("()[]{}")  # only in a text with operators: (2+3)*4


def words_of(text: str) -> list[str]:
    """Return the words, numbers and operators of a text, in order."""
    if text.isascii():
        pattern, plain = _ASCII, text.lower()
    else:
        pattern, plain = _unicode_pattern(), _fold(text)
    plain = _APOSTROPHE.sub("", plain)
    if "," in plain:
        plain = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), plain)
    tokens = pattern.findall(plain)
    if all(token[0].isalnum() for token in tokens):
        return tokens
    return _without_punctuation(tokens)


def is_long(words: Sequence[str]) -> bool:
    """Return True if a text is compared by similarity. In a shorter one, each word matters."""
    return len(words) >= ENOUGH and sum(word[0].isalpha() for word in words) >= ENOUGH


def _without_punctuation(tokens: list[str]) -> list[str]:
    kept = []
    operators = 0
    for place, token in enumerate(tokens):
        if token[-1].isalnum() or token[0].isalnum() or token in _BRACKETS:
            kept.append(token)
        elif _is_operator(token, tokens[place - 1] if place else "", tokens[place + 1 : place + 2]):
            kept.append(token)
            operators += 1
    return kept if operators else [token for token in kept if token not in _BRACKETS]


def _is_operator(sign: str, before: str, rest: list[str]) -> bool:
    """Return True if a sign is an operator, judged by the tokens beside it."""
    after = rest[0] if rest else ""
    if sign in _ALWAYS:
        return True
    if sign == "-":
        if _is_operand(before):
            return _is_operand(after) or after == "-"
        # -x, but not " - a"
        return _is_number(after) or (_is_operand(after) and after not in _ARTICLES)
    if sign in _BETWEEN:  # a power (2**3) is two signs
        left, right = before == sign, after in ("-", "+", sign)
        return (left or _is_operand(before)) and (right or _is_operand(after))
    if sign == "!":
        return _is_number(before) or after == "="
    if sign == "#":  # C#
        return len(before) == 1 and before.isalpha()
    if sign.isascii():
        return sign == "$" and _is_number(after)
    return unicodedata.category(sign)[0] in "SM"  # €, ∈, an emoji


def _is_number(token: str) -> bool:
    return token[-1:].isdigit()


def _is_operand(token: str) -> bool:
    return _is_number(token) or token in _BRACKETS or (len(token) == 1 and token.isalpha())


def _fold(text: str) -> str:
    """Apply NFKC and casefold, keeping numbers apart that NFKC would join (2² -> 22)."""
    text = _RAISED.sub(lambda match: f"^{match[0]}", text)
    text = _OTHER_NUMBER.sub(lambda match: f" {match[0]} ", text)
    text = unicodedata.normalize("NFKC", _UNSEEN.sub("", text).translate(_SAME)).casefold()
    return _UNSPACED.sub(r" \1 ", unicodedata.normalize("NFKC", text).translate(_SAME))


@cache
def _unicode_pattern() -> re.Pattern[str]:
    """Return _ASCII for all scripts. Vowel signs and accents belong to the word before them."""
    marks = "".join(
        re.escape(chr(code))
        for code in range(0x300, 0x1F000)
        if unicodedata.category(chr(code))[0] == "M"
    )
    return re.compile(rf"{_NUMBER}|(?:{_WORD}[{marks}]*)+|\S")
