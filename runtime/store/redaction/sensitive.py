"""Sensitive text: patterns of e-mail addresses, API keys, tokens and card numbers.

All patterns are bounded or anchored, so a scan takes time proportional to the length of any text.
Phone numbers are not included, since many other texts look like them. A match may follow an escape
of JSON (`\\n`, `\\u003c`), for texts often hold JSON. Called by redactor.py.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

Substitute = Callable[[str], tuple[str, int]]  # text -> redacted text, number of matches

KINDS = ("email", "api_key", "token", "card")
CONTEXT = 64  # characters before a long word that may hold its name: `api_key = `
LONG = 16  # characters: shorter words are not taken for keys

# a word begins after anything but a letter or digit, or after an escape that ends in one
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbfv])|(?<=\\u[0-9a-fA-F]{4}))"
_DIGIT = r"(?=[A-Za-z0-9_+/.~=-]{0,64}[0-9])"  # most words of code have none
_NAMED = (  # names of keys, with an assignment
    r"(?i:api[_-]?key|secret[_-]?key|secret[_-]?access[_-]?key|access[_-]?key|client[_-]?secret"
    r"|auth[_-]?token|access[_-]?token|refresh[_-]?token)"
    r"[\"'\\]{0,4}\s{0,4}[:=]\s{0,4}[\"'\\]{0,4}"
)
_API_KEY = re.compile(
    rf"(?P<name>{_NAMED}){_DIGIT}(?!-?[0-9]+\.[0-9]+(?![A-Za-z0-9_+/.~=-]))[A-Za-z0-9_+/.~=-]{{16,}}"
    rf"|{_START}(?:"
    rf"sk-{_DIGIT}[A-Za-z0-9_-]{{16,}}"  # OpenAI, Anthropic, this platform
    r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])"  # AWS
    r"|AIza[A-Za-z0-9_-]{35}"  # Google
    r"|[rsp]k_(?:live|test)_[A-Za-z0-9]{16,}"  # Stripe
    r"|SG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,}"  # SendGrid
    r")"
)
_TOKEN = re.compile(
    rf"(?P<name>{_START}(?i:bearer)\s{{1,4}})[A-Za-z0-9_.~+/=-]{{16,}}"
    rf"|{_START}(?:"
    r"eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*)?"  # JWT
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,}"  # GitHub
    r"|glpat-[A-Za-z0-9_-]{20,}"  # GitLab
    r"|xox[abeoprs]-[A-Za-z0-9-]{11,}|xapp-[A-Za-z0-9-]{16,}"  # Slack
    r"|hf_[A-Za-z0-9]{30,}|npm_[A-Za-z0-9]{30,}"  # Hugging Face, npm
    r")"
)
_HINT = re.compile(  # in lower case: every match of the two patterns above has one of these
    rb"sk-|k_live|k_test|akia|asia|abia|acca|aiza|sg\.|bearer|eyj|gh[pousr]_|_pat_|glpat|xox|xapp|hf_|npm_"
    rb"|key|secret|token"
)
_DECIMAL = re.compile(rb"-?[0-9]+\.[0-9]+")  # the most common long words
_BEGIN = "-----BEGIN "
_PRIVATE_KEY = re.compile(  # also one whose end is missing
    r"-----BEGIN (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[A-Za-z0-9+/=\s\\:,.()]|-(?!----))*+"
    r"(?:-----END [A-Z0-9 ]{1,60}-----)?"
)
_DOMAIN = re.compile(r"(?:@|%40)(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])")
_LOCAL = re.compile(r"[A-Za-z0-9._%+'-]{1,64}\Z")
_ESCAPE = re.compile(r"\\(?:[nrtbfv]|u[0-9a-fA-F]{4})")
_CARD = re.compile(
    r"[2-6](?:(?<![A-Za-z0-9].)|(?<=\\[nrtbfv].)|(?<=\\u[0-9a-fA-F]{4}.))(?<![0-9]\..)(?:"
    r"[0-9]{3}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{1,4}(?P<tail>\1[0-9]{3})?"
    r"|[0-9]{3}([ -])[0-9]{6}\3[0-9]{4,5}"
    r"|[0-9]{12,18}"
    r")(?![A-Za-z0-9])(?!\.[0-9])"
)

# for `suspicious`: tables from bytes to classes of characters
_WORD = bytes(
    97 if chr(b) in "_-+/.~=" or (b < 128 and chr(b).isalnum()) else 32 for b in range(256)
)
_LONG_WORD = b"a" * LONG
_DIGIT_OR_SEPARATOR = bytes(
    100 if 48 <= b < 58 else 32 if chr(b) in " -" else 46 if b == 46 else 120 for b in range(256)
)
_CARDS = (b"d" * 13, b"dddd dddd dddd ", b"dddd dddddd dddd")  # beginnings of card numbers


class Sensitive(NamedTuple):
    """A set of KINDS to look for together."""

    kinds: frozenset[str]

    def suspicious(self, text: str) -> bool:
        """Tell quickly whether a text may have any match. False is always right."""
        if "email" in self.kinds and ("@" in text or "%40" in text) and _DOMAIN.search(text):
            return True
        data = text.encode("utf-8", "replace")
        if "card" in self.kinds and _has_cards(data):
            return True
        if "token" in self.kinds and _BEGIN in text:
            return True
        return bool(self.kinds & {"api_key", "token"}) and self._has_keys(data)

    def substitutes(self) -> "list[tuple[str, Substitute]]":
        """Return the function that redacts each kind, in the order to apply them."""
        ordered: list[tuple[str, Substitute]] = [
            ("token", _redact_tokens),
            ("api_key", _redact_api_keys),
            ("email", _redact_emails),
            ("card", _redact_cards),
        ]
        return [(kind, take) for kind, take in ordered if kind in self.kinds]

    def _has_keys(self, data: bytes) -> bool:
        """Tell whether a long word of a text is a key. Equal words are checked once."""
        words = data.translate(_WORD)
        windows = set()
        start = words.find(_LONG_WORD)
        while start >= 0:
            end = words.find(b" ", start)
            end = len(words) if end < 0 else end
            if not _DECIMAL.fullmatch(data, start, end):
                windows.add(data[max(0, start - CONTEXT) : end])
            start = words.find(_LONG_WORD, end)
        patterns = [
            p for kind, p in (("api_key", _API_KEY), ("token", _TOKEN)) if kind in self.kinds
        ]
        hinted = (window for window in windows if _HINT.search(window.lower()))
        texts = (window.decode("utf-8", "ignore") for window in hinted)
        return any(pattern.search(text) for text in texts for pattern in patterns)


def placeholder(kind: str) -> str:
    """Return the text that replaces a match."""
    return f"[redacted:{kind}]"


def luhn(digits: str) -> bool:
    """Tell whether the last digit is a valid check digit (ISO/IEC 7812-1, annex B)."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def _has_cards(data: bytes) -> bool:
    digits = data.translate(_DIGIT_OR_SEPARATOR)
    for begin in _CARDS:
        start = digits.find(begin)
        while start >= 0:
            end = start + len(begin)
            while digits[end : end + 1] == b"d":
                end += 1
            decimals = digits[start - 2 : start] == b"d."  # the most common long numbers
            if not decimals and _CARD.search(data[max(0, start - 8) : end + 24].decode("latin-1")):
                return True
            start = digits.find(begin, end)
    return False


def _redact_tokens(text: str) -> tuple[str, int]:
    text, blocks = _PRIVATE_KEY.subn(placeholder("token"), text)
    text, tokens = _TOKEN.subn(_keep_name("token"), text)
    return text, blocks + tokens


def _redact_api_keys(text: str) -> tuple[str, int]:
    return _API_KEY.subn(_keep_name("api_key"), text)


def _keep_name(kind: str) -> Callable[[re.Match[str]], str]:
    """Return a function that replaces a match but keeps the name in front of it."""
    return lambda match: (match["name"] or "") + placeholder(kind)


def _redact_emails(text: str) -> tuple[str, int]:
    """Redact addresses: find each domain, then search backwards for the beginning."""
    pieces, done, count = [], 0, 0
    for match in _DOMAIN.finditer(text):
        before = text[max(done, match.start() - 64) : match.start()]
        local = _LOCAL.search(before)
        if local is None:
            continue
        start = match.start() - (len(before) - local.start())
        escape = _ESCAPE.match(text, start - 1) if start else None
        start = escape.end() if escape and escape.end() < match.start() else start
        pieces += [text[done:start], placeholder("email")]
        done, count = match.end(), count + 1
    return ("".join([*pieces, text[done:]]), count) if count else (text, 0)


def _redact_cards(text: str) -> tuple[str, int]:
    count = 0

    def redact(match: re.Match[str]) -> str:
        nonlocal count
        whole, tail = match[0], match["tail"] or ""
        for digits in (whole, whole.removesuffix(tail)):  # a security code may follow
            plain = digits.replace(" ", "").replace("-", "")
            if 13 <= len(plain) <= 19 and luhn(plain):
                count += 1
                return placeholder("card")
        return whole

    return _CARD.sub(redact, text), count
