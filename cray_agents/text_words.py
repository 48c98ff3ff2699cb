"""What a text says, as words: equal for texts that differ only in case, spaces and punctuation.

    "What's  2+3 ?" -> whats 2 + 3          "well-known" -> well known        "1,000.0" -> 1000.0
    "x = -5" -> x = - 5                     "23" -> 23                        "2²" -> 2 ^ 2

Numbers and operators are no punctuation: `2+3`, `23`, `-5` and `5` are four texts. A sign that may
be either (- / * . ! and brackets) counts where it stands with numbers or single letters, as in a
formula. `is_long` says which texts are compared by similarity, that of their sets of 5-grams.
This is the one rule of what is the same input: splits.py holds a TaskSet's splits apart by it,
runtime/datasets/decontamination.py keeps training sets clean by it.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

ENOUGH = 10  # words (not numbers, not signs) that a text needs, to be compared by similarity
GRAM = 5  # words in a row that make a member of a text's set
SIMILAR = 0.8  # the Jaccard similarity of two sets from which on the texts are the same input

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

_ALWAYS = frozenset("+=<>^%")  # operators wherever they stand
_BETWEEN = frozenset("*/|&~")  # only between operands
_ARTICLES = ("a", "i")
_BRACKETS = frozenset("()[]{}")  # only in a text with operators: (2+3)*4


def words_of(text: str) -> list[str]:
    """The words, numbers and operators of a text, in order."""
    if text.isascii():
        pattern, plain = _ASCII, text.lower()
    else:
        pattern, plain = _pattern(), _folded(text)
    plain = _APOSTROPHE.sub("", plain)
    if "," in plain:
        plain = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), plain)
    parts = pattern.findall(plain)
    if all(part[0].isalnum() for part in parts):
        return parts
    return _without_punctuation(parts)


def is_long(words: Sequence[str]) -> bool:
    """Whether a text is compared by similarity: in a shorter one, one word makes another task."""
    return len(words) >= ENOUGH and sum(word[0].isalpha() for word in words) >= ENOUGH


def _without_punctuation(parts: list[str]) -> list[str]:
    kept = []
    operators = 0
    for place, part in enumerate(parts):
        if part[-1].isalnum() or part[0].isalnum() or part in _BRACKETS:
            kept.append(part)
        elif _counts(part, parts[place - 1] if place else "", parts[place + 1 : place + 2]):
            kept.append(part)
            operators += 1
    return kept if operators else [part for part in kept if part not in _BRACKETS]


def _counts(sign: str, before: str, rest: list[str]) -> bool:
    """Whether a sign is an operator, by what stands beside it."""
    after = rest[0] if rest else ""
    if sign in _ALWAYS:
        return True
    if sign == "-":
        if _operand(before):
            return _operand(after) or after == "-"
        return _number(after) or (_operand(after) and after not in _ARTICLES)  # -x, not " - a"
    if sign in _BETWEEN:  # a power (2**3) is two signs
        left, right = before == sign, after in ("-", "+", sign)
        return (left or _operand(before)) and (right or _operand(after))
    if sign == "!":
        return _number(before) or after == "="
    if sign == "#":  # C#
        return len(before) == 1 and before.isalpha()
    if sign.isascii():
        return sign == "$" and _number(after)
    return unicodedata.category(sign)[0] in "SM"  # €, ∈, an emoji


def _number(part: str) -> bool:
    return part[-1:].isdigit()


def _operand(part: str) -> bool:
    return _number(part) or part in _BRACKETS or (len(part) == 1 and part.isalpha())


def _folded(text: str) -> str:
    """NFKC and casefold, with numbers kept apart that NFKC would run together (2² -> 22)."""
    text = _RAISED.sub(lambda found: f"^{found[0]}", text)
    text = _OTHER_NUMBER.sub(lambda found: f" {found[0]} ", text)
    text = unicodedata.normalize("NFKC", _UNSEEN.sub("", text).translate(_SAME)).casefold()
    return _UNSPACED.sub(r" \1 ", unicodedata.normalize("NFKC", text).translate(_SAME))


@cache
def _pattern() -> re.Pattern[str]:
    """As _ASCII, for all scripts; vowel signs and accents belong to the word they stand on."""
    marks = "".join(
        re.escape(chr(code))
        for code in range(0x300, 0x1F000)
        if unicodedata.category(chr(code))[0] == "M"
    )
    return re.compile(rf"{_NUMBER}|(?:{_WORD}[{marks}]*)+|\S")
