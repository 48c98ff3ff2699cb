"""Token text: the exact bytes of tokens, from a checkpoint's tokenizer.json, without a tokenizer.

A token's bytes follow from its entry in the vocabulary and the kind of the tokenizer's decoder:

    ByteLevel     each character stands for a byte (GPT-2's table): Qwen, Llama 3, GPT
    ByteFallback  `<0x0A>` is a byte, U+2581 a space: Llama 2, Mistral, Gemma
    Metaspace     U+2581 is a space: T5
    others        the entry itself (WordPiece: without `##`, else after a space); not exact

Only the first two can write every text, so only they are exact. An added token is its own text.
Called by gateway/routes/run_views.py and dataset_views.py.
"""

import base64
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry import checkpoints

FILE = "tokenizer.json"
CACHED = 4  # vocabularies in memory: some tens of MB each
SPACE = "\u2581"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Decoders whose tokens have exact bytes, as they stand in tokenizer.json.
EXACT = ("ByteLevel", "ByteFallback")


@dataclass(frozen=True)
class TokenTexts:
    """Texts of tokens; see TurnTokens. `bytes` has the base64 of those that are no whole text."""

    texts: list[str]
    bytes: dict[str, str]


class Vocabulary:
    """The entries of a tokenizer.json: the bytes of each token id. Raises Corrupt."""

    def __init__(self, content: dict[str, Any]) -> None:
        kinds = set(_decoder_kinds(content.get("decoder")))
        self._kind = next(
            (kind for kind in (*EXACT, "Metaspace", "WordPiece") if kind in kinds), ""
        )
        self.exact = self._kind in EXACT
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            self._entries = {number: entry for entry, number in vocabulary.items()}
        else:  # Unigram: [entry, score] by id
            self._entries = {number: entry for number, (entry, _) in enumerate(vocabulary)}
        self._added: dict[int, bytes] = {
            added["id"]: added["content"].encode("utf-8", "surrogatepass")
            for added in content.get("added_tokens") or ()
        }

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; of an id that the vocabulary lacks, its number in marks."""
        added = self._added.get(token)
        if added is not None:
            return added
        entry = self._entries.get(token)
        if entry is None:
            return f"<{token}>".encode()
        if self._kind == "ByteLevel":
            with suppress(KeyError):  # else the entry is its own text
                return bytes(map(_byte_table().__getitem__, entry))
        if self._kind == "ByteFallback" and (match := BYTE.fullmatch(entry)):
            return bytes([int(match[1], 16)])
        if self._kind in ("ByteFallback", "Metaspace"):
            entry = entry.replace(SPACE, " ")
        elif self._kind == "WordPiece":
            entry = entry[2:] if entry.startswith("##") else f" {entry}"
        return entry.encode("utf-8", "surrogatepass")

    def texts_of(self, tokens: Sequence[int]) -> TokenTexts:
        """Return the text of each token; tokens that share a character have U+FFFD for it."""
        texts, exact = [], {}
        for index, token in enumerate(tokens):
            content = self.bytes_of(token)
            try:
                texts.append(content.decode())
            except UnicodeDecodeError:
                texts.append(content.decode("utf-8", "replace"))
                exact[str(index)] = base64.b64encode(content).decode()
        return TokenTexts(texts, exact)


class Vocabularies:
    """The vocabularies of checkpoints, by the hash of their file, for any number of threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Vocabulary] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, checkpoint: Path) -> Vocabulary:
        """Return the vocabulary of a checkpoint. Raises NotFound without a file, Corrupt."""
        sha256, path = None, checkpoint / FILE
        with suppress(NotFound):
            sha256 = checkpoints.manifest_of(checkpoint).files.get(FILE)
        if sha256 is None and path.is_file():  # a model from elsewhere
            sha256 = checksums.hash_of(path)
        if sha256 is None:
            raise NotFound(
                f"checkpoint {checkpoint.name} has no {FILE}: its tokens have no text here",
                param="model",
                code="no_tokenizer",
            )
        with self._lock:  # also while it is read: several readers would each hold all of it
            known = self._known.get(sha256)
            if known is None:
                known = self._known[sha256] = _read(path, sha256)
            self._known.move_to_end(sha256)
            while len(self._known) > CACHED:
                self._known.popitem(last=False)
        return known


def _read(path: Path, sha256: str) -> Vocabulary:
    try:
        content = checksums.prove(path, sha256).read_bytes()
    except FileNotFoundError:
        raise NotFound(f"{path.parent.name} has no {FILE} any more", param="model") from None
    try:
        return Vocabulary(orjson.loads(content))
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{path} is no tokenizer's file: {error!r}") from error


def _decoder_kinds(decoder: Any) -> Iterable[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders") or ():
            yield from _decoder_kinds(inner)


@cache
def _byte_table() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for, as in GPT-2."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    unprintable = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(256 + number): byte for number, byte in enumerate(unprintable)}


Body = dict[str, Any]


def score_request(call: Body, version: str, top: int) -> Body:
    """Return the request for /v1/completions that scores the tokens of a recorded call."""
    return {
        "model": version,
        "prompt": [*call["prompt_token_ids"], *call["token_ids"]],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": top,
    }


def parse_score(call: Body, answer: Body, vocabulary: Vocabulary) -> Body:
    """Return the lists of a TurnScore from the engine's answer.

    Raises BadInput, code `unsupported_engine`, for an answer without logprobs of the prompt.
    """
    rows = answer["choices"][0].get("prompt_logprobs")
    sampled, start = call["token_ids"], len(call["prompt_token_ids"])
    if not rows or len(rows) != start + len(sampled):
        raise BadInput(
            "this engine gives no logprobs of a prompt's tokens, by which a turn is scored",
            param="model",
            code="unsupported_engine",
        )
    logprobs: list[float | None] = []
    tops: list[list[Body]] = []
    entropies: list[float | None] = []
    for token, row in zip(sampled, rows[start:], strict=True):
        if row is None:  # the first token of all follows nothing
            logprobs.append(None)
            tops.append([])
            entropies.append(None)
            continue
        logprobs.append(_finite(row[str(token)]["logprob"]))
        likely = sorted(row.items(), key=lambda item: int(item[1]["rank"]))
        tops.append([_top_token(int(name), entry, vocabulary) for name, entry in likely])
        entropies.append(_entropy([float(entry["logprob"]) for _, entry in likely]))
    recorded = [*call["logprobs"], *[None] * (len(sampled) - len(call["logprobs"]))]
    return {
        "ids": sampled,
        "logprobs": logprobs,
        "recorded": recorded,
        "top": tops,
        "entropy": entropies,
    }


def _top_token(token: int, entry: Body, vocabulary: Vocabulary) -> Body:
    text = vocabulary.bytes_of(token).decode("utf-8", "replace")
    return {"id": token, "text": text, "logprob": _finite(entry["logprob"]), "rank": entry["rank"]}


def _entropy(logprobs: list[float]) -> float:
    """Return the entropy of these tokens and of the rest as one token, in nats.

    Splitting the rest would only add to it, so it is a lower bound.
    """
    chances = [math.exp(value) for value in logprobs if math.isfinite(value)]
    rest = max(0.0, 1.0 - sum(chances))
    return -sum(chance * math.log(chance) for chance in [*chances, rest] if chance > 0)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
