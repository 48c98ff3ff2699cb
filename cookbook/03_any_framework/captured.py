"""Where the gateway is, and what it captured of an agent that knows nothing of it.

Used by the three recipes beside this file. Needs nothing but Python.
"""

import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

GATEWAY = os.environ.get("CRAY_AGENTS_URL", "http://127.0.0.1:8000").rstrip("/")
API_KEY = os.environ.get("CRAY_AGENTS_API_KEY", "none")
BEGUN = time.time()


def base_url() -> str:
    """What to give to any OpenAI client.

    With `--run NAME` all its calls belong to the run of that name. Without, each conversation
    becomes a run of its own, found by how its messages begin.
    """
    if "--run" in sys.argv:
        return f"{GATEWAY}/runs/{sys.argv[sys.argv.index('--run') + 1]}/v1"
    return f"{GATEWAY}/v1"


def show() -> None:
    """Print the runs that began since this script did, with what was sampled at each turn."""
    for run_id in new_runs():
        run = get(f"/v1/trajectories/{run_id}")
        turns, tokens = run["trajectory"]["turns"], run["usage"]["completion_tokens"]
        print(f"run {run_id}: {len(turns)} turns, {tokens} tokens sampled")
        for call in (turn["call"] for turn in turns):
            read, sampled = len(call["prompt_token_ids"]), len(call["token_ids"])
            print(f"  {call['model']}: {read} tokens read, {sampled} sampled: {said(call)}")


def new_runs() -> Iterator[str]:
    """The ids of the runs that began since this script did, but those of agents of ours."""
    after = ""
    while True:
        page = get(f"/v1/trajectories?limit=1000{after}")
        yield from (r["id"] for r in page["data"] if r["started"] >= BEGUN and not r["agent"])
        if not page["has_more"]:
            return
        after = f"&after={page['last_id']}"


def said(call: dict[str, Any]) -> str:
    """What the model answered, in short."""
    calls = [tool["function"] for tool in call["message"].get("tool_calls") or []]
    words = [f"{function['name']}({function['arguments']})" for function in calls]
    return " ".join([*words, call["message"].get("content") or ""]).strip()


def get(path: str) -> dict[str, Any]:
    """The gateway's answer to a GET."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    with urllib.request.urlopen(urllib.request.Request(GATEWAY + path, headers=headers)) as answer:
        return dict(json.load(answer))
