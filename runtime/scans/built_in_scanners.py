"""Built-in scanners: `secrets` by our own patterns, `pii` by presidio where it is installed.

`cray-agents scan secrets` takes them by name. Each counts what it found in the text that the model
wrote, with the kinds as comment, never with the text itself. People's own scanners are functions
with `@scanner` (cray_agents/rewards/scanner.py).
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from cray_agents.errors import BadInput, SetupError
from cray_agents.records import Run
from cray_agents.rewards.reward import RewardFunction, Verdict
from cray_agents.rewards.scanner import scanner
from cray_agents.runtime.scans import sampled_texts
from cray_agents.runtime.store.redaction.sensitive import KINDS, Sensitive

LEAST_SCORE = 0.4  # of a presidio result, from 0 to 1: a phone number's
# of presidio's kinds those that have a check digit or a strict form
ENTITIES = [
    *("EMAIL_ADDRESS", "PHONE_NUMBER", "IBAN_CODE", "CREDIT_CARD", "IP_ADDRESS", "CRYPTO"),
    "US_SSN",
]
PIECE = 100_000  # characters that presidio reads at a time


def built_in_scanner(name: str) -> RewardFunction:
    """Return the built-in scanner of this name. Raises BadInput, SetupError."""
    if name not in _MAKERS:
        raise BadInput(
            f"{name!r} is no scanner: give one of {', '.join(_MAKERS)}, or your own as "
            "FILE.py:NAME or MODULE:NAME",
            param="scanner",
        )
    return scanner(_MAKERS[name](), name=name)


def _secrets() -> RewardFunction:
    """Count e-mail addresses, API keys, tokens and card numbers, as redaction finds them."""
    patterns = Sensitive(frozenset(KINDS))
    substitutes = patterns.substitutes()

    def secrets(run: Run) -> Verdict:
        counts: Counter[str] = Counter()
        for text in sampled_texts(run):
            if patterns.suspicious(text):
                for kind, substitute in substitutes:
                    text, count = substitute(text)
                    counts[kind] += count
        return _verdict(counts)

    return secrets


def _pii() -> RewardFunction:
    """Count what presidio's rules recognise as one of ENTITIES.

    It reads about ten thousand characters a second. Names of people and places need a language
    model of spaCy, and none is loaded.
    """
    analyzer = _presidio()

    def pii(run: Run) -> Verdict:
        counts: Counter[str] = Counter()
        for text in sampled_texts(run):
            for start in range(0, len(text), PIECE):
                piece = text[start : start + PIECE]
                results = analyzer.analyze(
                    piece, language="en", entities=ENTITIES, score_threshold=LEAST_SCORE
                )
                counts.update(each.entity_type.lower() for each in results)
        return _verdict(counts)

    return pii


@functools.cache
def _presidio() -> Any:
    try:
        import tldextract.tldextract
        from presidio_analyzer import AnalyzerEngine
        from presidio_analyzer.nlp_engine import NoOpNlpEngine
    except ImportError as error:
        raise SetupError(
            f"the scanner pii needs presidio, which is not installed ({error}): "
            "pip install presidio-analyzer"
        ) from error
    tldextract.tldextract.TLD_EXTRACTOR.suffix_list_urls = ()  # it would fetch a list of domains
    engine = NoOpNlpEngine([{"lang_code": "en", "model_name": "none"}])
    return AnalyzerEngine(nlp_engine=engine, supported_languages=["en"])


def _verdict(counts: Counter[str]) -> Verdict:
    present = {kind: count for kind, count in sorted(counts.items()) if count}
    comment = ", ".join(f"{count} {kind}" for kind, count in present.items()) or None
    return Verdict(sum(present.values()), comment)


_MAKERS: dict[str, Callable[[], RewardFunction]] = {"secrets": _secrets, "pii": _pii}
