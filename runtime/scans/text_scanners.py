"""Text scanners, by name: what they look for in a text, by patterns and by small packages.

`secrets` and the others read what the model wrote, as `prompt-secrets` what its users wrote;
`jailbreak` reads what users and tools said. `Blocks` looks at a call by them, before its answer is
given, where the setting `watch.block` asks for that. built_in_scanners.py makes scanners of runs of
them.
"""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from cray_agents.errors import BadInput, SetupError
from cray_agents.records import Message
from cray_agents.runtime.disk.turns import between_pieces
from cray_agents.runtime.scans import message_texts, side_of
from cray_agents.runtime.store.redaction.sensitive import KINDS, Sensitive

TextScan = Callable[[str], Counter[str]]  # a text -> how often it has what, by kind

LEAST_SCORE = 0.4  # of a presidio result, from 0 to 1: a phone number's
# of presidio's kinds those that have a check digit or a strict form
ENTITIES = [
    *("EMAIL_ADDRESS", "PHONE_NUMBER", "IBAN_CODE", "CREDIT_CARD", "IP_ADDRESS", "CRYPTO"),
    "US_SSN",
]
PIECE = 10_000  # characters that are read at a time, in which others wait
LONGEST = 500  # characters of a phrase
TOXIC = 0.7  # probability of the worst sentence from which a text is toxic
NEGATIVE = -0.4  # VADER's compound score, from -1 to 1, up to which a text's mean sentence is bad
PROMPT = "prompt-"  # begins the name of a scanner that reads what users wrote
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_REDACTED = re.compile(r"\[redacted:([A-Za-z][A-Za-z0-9_-]{0,63})\]")
ASSISTANT = ("assistant",)
ROLES = {"jailbreak": ("user", "tool")}  # of all others: the assistant, or with PROMPT the user


class TextScanner(NamedTuple):
    """A scanner of texts: what it looks for, and in whose messages (`side_of`)."""

    name: str
    find: TextScan
    roles: Sequence[str]

    def found_in(self, texts: Iterable[str]) -> Counter[str]:
        """Return how often it found what in the texts."""
        return sum(map(self.find, texts), Counter[str]())


class Blocks:
    """The scanners that keep messages from the model, and answers from the client."""

    def __init__(self, names: Sequence[str]) -> None:
        self._scanners = [text_scanner(name) for name in names]
        #: Whether answers are looked at, so that a stream waits for its end.
        self.answers = any(each.roles == ASSISTANT for each in self._scanners)

    def check(self, messages: Sequence[Message], *, answer: bool) -> None:
        """Raise BadInput (`content_filter`) if a scanner finds something in a call's messages.

        `answer`: they are the answer, else what was asked.
        """
        for each in self._scanners:
            if (each.roles == ASSISTANT) != answer:
                continue
            looked_at = (m for m in messages if side_of(m) in each.roles)
            if each.found_in(text for message in looked_at for text in message_texts(message)):
                what = "this answer is withheld" if answer else "this request is not answered"
                raise BadInput(
                    f"{what}: the operator's scanner {each.name} found something in it",
                    param=None if answer else "messages",
                    code="content_filter",
                )


def text_scanner(name: str) -> TextScanner:
    """Return the built-in scanner of texts of this name. Raises BadInput, SetupError."""
    plain = name.removeprefix(PROMPT)
    if plain not in MAKERS or (plain != name and plain in ROLES):
        more = (PROMPT + each for each in MAKERS if each not in ROLES)
        raise BadInput(
            f"{name!r} is no scanner of texts: give one of {', '.join([*MAKERS, *more])}",
            param="scanner",
        )
    roles = ROLES.get(plain, ASSISTANT if plain == name else ("user",))
    return TextScanner(name, MAKERS[plain](), roles)


def _secrets() -> TextScan:
    """Find e-mail addresses, API keys, tokens and card numbers, as redaction finds them.

    What redaction has replaced counts, too.
    """
    patterns = Sensitive(frozenset(KINDS))
    substitutes = patterns.substitutes()

    def find(text: str) -> Counter[str]:
        counts = Counter(_REDACTED.findall(text))
        if patterns.suspicious(text):
            for kind, substitute in substitutes:
                text, count = substitute(text)
                counts[kind] += count
        return +counts

    return find


def _pii() -> TextScan:
    """Find what presidio's rules recognise as one of ENTITIES.

    It reads about ten thousand characters a second. Names of people and places need a language
    model of spaCy, and none is loaded.
    """
    analyzer = _presidio()

    def find(text: str) -> Counter[str]:
        counts = Counter(_REDACTED.findall(text))
        for start in range(0, len(text), PIECE):
            between_pieces()
            results = analyzer.analyze(
                text[start : start + PIECE],
                language="en",
                entities=ENTITIES,
                score_threshold=LEAST_SCORE,
            )
            counts.update(each.entity_type.lower() for each in results)
        return counts

    return find


@functools.cache
def _presidio() -> Any:
    try:
        import tldextract.tldextract
        from presidio_analyzer import AnalyzerEngine
        from presidio_analyzer.nlp_engine import NoOpNlpEngine
    except ImportError as error:
        raise _missing("pii", "presidio-analyzer", error) from error
    tldextract.tldextract.TLD_EXTRACTOR.suffix_list_urls = ()  # it would fetch a list of domains
    engine = NoOpNlpEngine([{"lang_code": "en", "model_name": "none"}])
    return AnalyzerEngine(nlp_engine=engine, supported_languages=["en"])


def _toxicity() -> TextScan:
    """Find sentences that the linear model of alt-profanity-check takes for offensive (English)."""
    try:
        from profanity_check import predict_prob
    except ImportError as error:
        raise _missing("toxicity", "alt-profanity-check", error) from error

    def find(text: str) -> Counter[str]:
        sentences = _sentences(text)
        worst = sum(p >= TOXIC for p in predict_prob(sentences)) if sentences else 0
        return +Counter(toxic=int(worst))

    return find


def _sentiment() -> TextScan:
    """Find texts of bad temper by VADER (Hutto and Gilbert 2014): the mean of their sentences.

    English, by a lexicon. Sentences without an opinion do not count.
    """
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise _missing("sentiment", "vaderSentiment", error) from error
    analyzer = SentimentIntensityAnalyzer()

    def find(text: str) -> Counter[str]:
        scores = []
        for sentence in _sentences(text):
            between_pieces()
            scores.append(analyzer.polarity_scores(sentence)["compound"])
        scores = [score for score in scores if score]
        return +Counter(negative=int(bool(scores) and sum(scores) / len(scores) <= NEGATIVE))

    return find


def _missing(name: str, package: str, error: ImportError) -> SetupError:
    return SetupError(
        f"the scanner {name} needs {package}, which is not installed ({error}): "
        f"pip install {package}"
    )


def _sentences(text: str) -> list[str]:
    return [each for each in _SENTENCE.split(text) if each.strip()]


# ---- attempts to jailbreak: phrases of which one is enough, and signs of which three are
_WORD = r"(?:\S{1,40} )"
_RULES = (
    r"(?:instructions?|prompts?|rules|guidelines|directions|directives|commands|programming"
    r"|training|restrictions|limitations|polic(?:y|ies)|filters?|safeguards|ethics|constraints"
    r"|guardrails|context)"
)
_PHRASES = re.compile(
    r"\b(?:ignore|disregard|forget|override|bypass|circumvent|disobey|freed? (?:of|from)) "
    rf"{_WORD}{{0,4}}?(?:all|any|your|the|my|these|those|every|previous|prior|earlier|above"
    rf"|preceding|former|initial|original) {_WORD}{{0,4}}?{_RULES}\b"
    r"|\b(?:forget|ignore|disregard) (?:everything|anything|all)\b.{0,20}"
    r"\b(?:before|above|told|said|previous|prior|instruct)"
    r"|\bdo anything now\b|\bjail ?br(?:eak|oken)"
    r"|\b(?:developer|dev|god|evil|dan|jailbreak|unrestricted|unfiltered|uncensored|opposite|debug"
    r"|sudo|admin) mode\b"
    r"|\b(?:no|without|not? (?:have|has|bound by|limited by|follow|restricted by|constrained by)"
    rf"|free (?:of|from)|lacks?|unbound by|devoid of|disabled?) {_WORD}{{0,5}}?"
    r"(?:restrictions|limitations|filters?|censorship|ethics|morals|morality|guidelines"
    r"|moral compass|content polic(?:y|ies)|safeguards|guardrails|moderation)\b"
    r"|\b(?:uncensored|unfiltered|amoral|unethical|unrestricted|immoral)\b.{0,40}"
    r"\b(?:ai|bot|assistant|chatbot|answers?|responses?|content|character|advice|gpt|model)\b"
    r"|\b(?:ai|bot|assistant|chatbot|answers?|responses?|content|character|gpt|model)\b.{0,40}"
    r"\b(?:uncensored|unfiltered|amoral|unethical)\b"
    r"|\b(?:reveal|print|repeat|output|show|leak|tell|give|write|display)\b.{0,40}"
    r"\b(?:system|initial|hidden|secret|developer) (?:prompt|instructions|message)\b"
    r"|\b(?:repeat|print|output)\b.{0,30}\b(?:instructions|text|words|everything) above\b"
)
_SIGNS = [
    re.compile(pattern)
    for pattern in (
        r"\byou (?:are|will) (?:now |no longer |going to )|\bfrom now on\b",
        r"\b(?:act as|pretend (?:to be|that|you)|role ?-?play|play the role|impersonate|simulate)",
        r"\b(?:in|out of|break) character\b",
        rf"\b(?:never|not|without|cannot|can't|won't|don't|no) {_WORD}{{0,3}}?"
        r"(?:refus|declin|apologi|warn|disclaimer|say no|morali|judg|censor)",
        r"\b(?:openai|content|safety|ethical|moral|usage|use)(?:'s)? (?:content )?"
        r"(?:polic(?:y|ies)|guidelines|standards|rules|protocols|principles|boundaries)\b",
        r"\b(?:illegal|unethical|immoral|explicit|nsfw|offensive|harmful|taboo|dangerous)\b",
        r"\b(?:hypothetical|fictional|fictitious|imaginary)\b",
        r"\bas an ai\b|\b(?:language model|chat ?gpt|openai)\b",
        r"\b(?:no matter what|regardless of|at all costs|unconditionally|comply with"
        r"|(?:must|always) (?:comply|obey|answer|respond))\b",
    )
]
ENOUGH_SIGNS = 3


def _jailbreak() -> TextScan:
    """Find phrases by which people try to make a model leave its rules aside (English)."""

    def find(text: str) -> Counter[str]:
        plain, signs = "", set[re.Pattern[str]]()
        for start in range(0, len(text), PIECE):
            between_pieces()
            plain = plain[-LONGEST:] + text[start : start + PIECE]
            plain = unicodedata.normalize("NFKC", plain).lower().replace("\u2019", "'")
            plain = re.sub(r"[\s*_#>\"`\u200b-\u200d]+", " ", plain)
            signs |= {sign for sign in _SIGNS if sign.search(plain)}
            if len(signs) >= ENOUGH_SIGNS or _PHRASES.search(plain):
                return Counter(attempt=1)
        return Counter()

    return find


MAKERS: dict[str, Callable[[], TextScan]] = {
    "secrets": _secrets,
    "pii": _pii,
    "toxicity": _toxicity,
    "sentiment": _sentiment,
    "jailbreak": _jailbreak,
}
