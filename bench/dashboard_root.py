"""Root for the dashboard's benchmark: many runs, one of 50 MB, one of a long answer, one of 1 GB.

A run of the last kind is what Inspect calls its largest: 300,000 events, which are 150,000 calls of
the model and as many of a tool. Called by dashboard.py.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from bench.corpus import write_corpus
from bench.views import write_long_run
from cray_agents.paths import Home
from cray_agents.runtime.disk.checksums import with_crc
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store.segments.sealed import write_sealed
from tests.runtime.views.test_run_views import model_with_tokenizer

TOKENS, TOKEN_RUN = 32_768, "tokens"
HUGE, HUGE_TURNS = "huge", 150_000
HUGE_TEXT = 360  # characters of each message and result


def write_root(home: Home, runs: int, *, huge: bool) -> None:
    """Write a root of so many runs beside the special ones."""
    write_corpus(home, runs)
    write_long_run(home)
    model = model_with_tokenizer(home.root.parent / "model")
    registry = Registry(home)
    registry.promote("m", registry.register("m", *registry.import_checkpoint(model)).number)
    vocabulary = len(orjson.loads((model / "tokenizer.json").read_bytes())["model"]["vocab"])
    write_token_run(home, vocabulary)
    if huge:
        write_sealed(home.segments, "segment_zhuge-0000", huge_lines())


def write_token_run(home: Home, vocabulary: int) -> None:
    """Write a run whose one answer has TOKENS tokens."""
    tokens = [n % vocabulary for n in range(TOKENS)]
    body = {
        "id": "call-tokens",
        "run_id": TOKEN_RUN,
        "model": "m@1",
        "messages": [{"role": "user", "content": "q"}],
        "message": {"role": "assistant", "content": "long"},
        "prompt_token_ids": [1],
        "token_ids": tokens,
        "logprobs": [-(n % 50) / 10 for n in tokens],
        "started": 1.0,
        "seconds": 9.0,
    }
    event = {"id": "call-tokens", "run_id": TOKEN_RUN, "kind": "call", "time": 1.0, "body": body}
    write_sealed(home.segments, "segment_tokens-0000", iter([with_crc(orjson.dumps(event))]))


def huge_lines() -> Iterator[bytes]:
    """Yield the events of the run of 1 GB; each call sees the last messages only."""
    text = "abcdefghij" * (HUGE_TEXT // 10)
    turns = []
    for number in range(HUGE_TURNS):
        seen = [{"role": "user", "content": f"{number - back}: {text}"} for back in range(12)]
        call = {
            "id": f"huge-{number}",
            "run_id": HUGE,
            "model": "calc@1",
            "messages": seen,
            "message": {"role": "assistant", "content": f"{number} {text}"},
            "prompt_token_ids": list(range(200)),
            "token_ids": list(range(60)),
            "logprobs": [-0.1] * 60,
            "started": float(number),
            "seconds": 0.5,
        }
        yield _line(f"huge-{number}", "call", number, call)
        done = {"id": f"h{number}", "name": "search", "arguments": "{}", "result": text}
        turns.append({"call_id": f"huge-{number}", "tool_calls": [done]})
    run: dict[str, Any] = {"id": HUGE, "agent": "a", "model": "calc@1", "input": "q", "output": "r"}
    run |= {"stop_reason": "completed", "trajectory": {"messages": [], "turns": turns}}
    yield _line("huge-run", "run", HUGE_TURNS, run)


def _line(name: str, kind: str, when: float, body: dict[str, Any]) -> bytes:
    event = {"id": name, "run_id": HUGE, "kind": kind, "time": float(when), "body": body}
    return with_crc(orjson.dumps(event))
