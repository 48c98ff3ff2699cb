"""Redacted text is nowhere in the store, and each record names the rules that took it out."""

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest

from cray_agents.config import Config, load_config
from cray_agents.errors import ConfigError, StoreError
from cray_agents.records import Event, ModelCall, Run
from cray_agents.runtime.store.redaction import Redactor
from cray_agents.runtime.store.redaction.sensitive import KINDS, Sensitive

SECRETS = {  # what is planted, and the kind it is of
    "jane.doe+x@mail.example.co.uk": "email",
    "o'neil@example.com": "email",
    "jane%40example.org": "email",
    "sk-proj-a8Zk1mQ0pLr7Vt3Xw9Yb2Nc5Hd6Jf4Ge": "api_key",
    "sk-ant-api03-Zx9Yw8Vu7Ts6Rq5Po4Nm3Lk2Ji1Hg0Fe": "api_key",
    "AKIAIOSFODNN7EXAMPLE": "api_key",
    "AIzaSyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q": "api_key",
    "sk_live_4eC39HqLyjWDarjtT1zdp7dc": "api_key",
    "ghp_A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8": "token",
    "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwx": "token",
    "xoxb-123456789012-abcdefABCDEF": "token",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P": "token",
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789": "token",
    "4111111111111111": "card",
    "5500 0055 5555 5559": "card",
    "3782-822463-10005": "card",
    "6011000990139424": "card",
}
KEY_BODY = "MIIEowIBAAKCAQEAxg7Q0sNn4w0Yh3Zk2mVb1Rr5Tt6Uu7Ii8Oo9Pp0Aa1Ss2Dd"
PRIVATE_KEY = (
    f"-----BEGIN RSA PRIVATE KEY-----\n{KEY_BODY}\n{KEY_BODY}==\n-----END RSA PRIVATE KEY-----"
)
INNOCENT = [
    "the total is 4111111111111112",  # no check digit
    "at 1718000000000 and 1718000000000000000",  # times
    "0.4111111111111111 of it",
    "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "sk-learn-like-names-of-modules and task-1234567890abcdef1234",
    "api_key = settings.the_key_of_the_platform",
    "calc@3 answers; @decorated; a @ b.com is none",
    "bearer of good news",
    "AKIA is short",
    "4 8 15 16 23 42 4 8 15 16 23 42 10 11 12 13",
    "runtime/store/redaction.py and a_long_name_with_many_words_in_it",
]


def call(**more: Any) -> Event:
    body: dict[str, Any] = {
        "id": "chatcmpl-018f4c3a9b7e4d1c8a2f5e6b7c8d9e0f",
        "run_id": "run_1",
        "api": "/v1/chat/completions",
        "model": "calc@3",
        "messages": [
            {"role": "system", "content": "You answer in short sentences."},
            {"role": "user", "content": "What is 47 + 385?"},
        ],
        "message": {"role": "assistant", "content": "It is 432."},
        "tools": [],
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [4, 5],
        "logprobs": [-0.1, -0.2],
        "sampling": {"temperature": 1.0},
        "finish_reason": "stop",
        "started": 1.0,
        "seconds": 0.5,
        "asked": "5d41402abc4b2a76b9719d911017c592",
        **more,
    }
    return Event(id=body["id"], run_id="run_1", kind="call", body=body)


def chunk(text: str, **more: Any) -> str:
    choice = {"index": 0, "delta": {"content": text}, **more}
    return "data: " + json.dumps({"id": "chatcmpl-1", "model": "calc@3", "choices": [choice]})


def all_kinds() -> Redactor:
    return Redactor(KINDS, {})


def texts(event: Event) -> str:
    """Everything in an event as text, JSON within JSON unpacked."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
            try:
                inner = json.loads(value)
            except ValueError:
                return
            if isinstance(inner, dict | list):
                walk(inner)
        elif isinstance(value, dict):
            for name, item in value.items():
                found.append(name)
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(event.body)
    return "\n".join(found)


@pytest.mark.parametrize("secret", SECRETS)
def test_each_kind_is_found_wherever_it_stands(secret: str) -> None:
    kind = SECRETS[secret]
    frames = ["{}", "is {}.", "({})", "a\n{}\nb", "x: {}, y", "'{}'", "<{}>", "{} 123", "\t{};"]
    for frame in frames:
        text = frame.format(secret)
        for content in (text, json.dumps({"note": text}), json.dumps({text: [text]})):
            made = all_kinds().apply(call(message={"role": "assistant", "content": content}))
            assert secret not in texts(made), (frame, content)
            assert kind in {r["kind"] for r in made.body["redacted"]}
            assert f"[redacted:{kind}]" in made.body["message"]["content"]
            if content != text:
                json.loads(made.body["message"]["content"])
    assert (
        Redactor([k for k in KINDS if k != kind], {}).apply(
            event := call(message={"role": "assistant", "content": secret})
        )
        is event
        or kind == "email"
    )


def test_a_private_key_with_and_without_its_end() -> None:
    for text in (PRIVATE_KEY, PRIVATE_KEY.partition("-----END")[0], json.dumps({"k": PRIVATE_KEY})):
        made = all_kinds().apply(call(message={"role": "assistant", "content": f"{text}"}))
        assert KEY_BODY[:20] not in json.dumps(made.body)
        assert made.body["redacted"] == [{"kind": "token", "count": 1}]
    said = all_kinds().apply(call(message={"content": PRIVATE_KEY + "\nGoodbye."}))
    assert said.body["message"]["content"] == "[redacted:token]\nGoodbye."


def test_named_and_carried_keys() -> None:
    for text, clean in {
        "OPENAI_API_KEY=aB3dE6gH9jK2mN5pQ8": "OPENAI_API_KEY=[redacted:api_key]",
        '{"client_secret": "aB3dE6gH9jK2mN5pQ8"} and': (
            '{"client_secret": "[redacted:api_key]"} and'
        ),
        "Authorization: Bearer abc.DEF_ghi-jkl/mno+p=": "Authorization: Bearer [redacted:token]",
        "https://joe:pa55@host.example.com/x": "https://joe:[redacted:email]/x",
    }.items():
        made = all_kinds().apply(call(message={"role": "assistant", "content": text}))
        assert made.body["message"]["content"] == clean


@pytest.mark.parametrize("text", INNOCENT)
def test_what_is_none_stays(text: str) -> None:
    event = call(message={"role": "assistant", "content": text})
    assert all_kinds().apply(event) is event


def test_a_call_without_findings_is_the_same_object() -> None:
    event = call(
        messages=[
            {"role": "user", "content": "caf\u00e9 \ud83d\ude00"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "chatcmpl-tool-018f4c3a9b7e4d1c8a2f5e6b7c8d9e0f",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 1, "b": "\\u00e9"}'},
                    }
                ],
            },
        ],
        reply=json.dumps({"id": "chatcmpl-1", "samples": [{"logprobs": [-0.4111111111111111]}]}),
    )
    assert all_kinds().apply(event) is event


def test_a_call_that_held_any_loses_its_tokens_and_keeps_its_ids() -> None:
    event = call(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "I am jane@example.com"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "jane@example.com",  # an id is not looked into
                        "type": "function",
                        "function": {
                            "name": "mail",
                            "arguments": '{"to": "jane\\u0040example.com", "n": 1}',
                        },
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "jane@example.com", "content": "sent"},
            {"role": "user", "content": [101, 102]},
        ],
        sampling={"temperature": 1.0, "user": "joe@example.com"},
        tags=["of joe@example.com"],
    )
    made = all_kinds().apply(event)
    assert made.body["redacted"] == [{"kind": "email", "count": 4}]
    assert [made.body[name] for name in ("prompt_token_ids", "token_ids", "logprobs")] == [[]] * 3
    for name in ("id", "run_id", "model", "asked", "started", "finish_reason"):
        assert made.body[name] == event.body[name]
    asked = made.body["messages"][1]["tool_calls"][0]
    assert asked["id"] == made.body["messages"][2]["tool_call_id"] == "jane@example.com"
    assert json.loads(asked["function"]["arguments"]) == {"to": "[redacted:email]", "n": 1}
    assert made.body["messages"][3]["content"] == []
    assert made.body["sampling"] == {"temperature": 1.0, "user": "[redacted:email]"}
    assert made.body["tags"] == ["of [redacted:email]"]
    assert ModelCall.model_validate(made.body).redacted[0].count == 4
    assert all_kinds().apply(made) is made
    assert event.body["token_ids"] == [4, 5]  # the given one is as it was


def test_a_run_and_all_its_texts() -> None:
    secret = "jane@example.com"
    run = {
        "id": "run_1",
        "agent": "mailer",
        "model": "calc@3",
        "input": f"write to {secret}",
        "output": {secret: [secret], "[redacted:email]": 1},
        "stop_reason": "error",
        "error": {"type": "ToolError", "message": f"{secret} is not known"},
        "task": {
            "id": "t-1",
            "split": "train",
            "input": f"write to {secret}",
            "target": secret,
            "metadata": {"who": {"mail": secret}},
        },
        "trajectory": {
            "messages": [{"role": "user", "content": secret, "name": secret}],
            "turns": [
                {
                    "call_id": "c1",
                    "tool_calls": [
                        {
                            "id": "t1",
                            "name": "send",
                            "arguments": json.dumps({"to": secret}),
                            "result": {"to": [secret]},
                            "error": f"no {secret}",
                        }
                    ],
                }
            ],
            "tools": [{"type": "function", "function": {"description": f"asks {secret}"}}],
        },
        "rewards": [],
        "tags": [secret],
        "redacted": [{"kind": "email", "count": 1}, {"kind": "own", "count": 2}],
    }
    made = all_kinds().apply(Event(id="e", run_id="run_1", kind="run", body=run))
    assert secret not in json.dumps(made.body)
    assert made.body["redacted"] == [{"kind": "email", "count": 15}, {"kind": "own", "count": 2}]
    redacted_run = Run.model_validate(made.body)
    assert redacted_run.task is not None and (redacted_run.task.id, redacted_run.task.split) == (
        "t-1",
        "train",
    )
    assert len(redacted_run.output) == 2  # two keys that became one are still two
    assert redacted_run.trajectory.turns[0].tool_calls[0].result == {"to": ["[redacted:email]"]}


def test_a_whole_reply_stays_json_and_loses_its_tokens() -> None:
    reply = {
        "id": "chatcmpl-1",
        "model": "calc@3",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "to\njane@example.com",
                    "tool_calls": [{"id": "c", "function": {"arguments": '{"m": "j@x.org"}'}}],
                },
                "logprobs": {"content": [{"token": "jane", "bytes": [106], "logprob": -0.5}]},
                "token_ids": [4, 5],
            }
        ],
        "usage": {"prompt_tokens": 3},
        "prompt_token_ids": [1, 2, 3],
    }
    text = json.dumps(reply)[:-1] + ',"samples":[{"token_ids":[4,5],"logprobs":[-0.5]}]}'
    made = all_kinds().apply(call(reply=text, fingerprint="ab@cd.ef"))
    redacted_reply = json.loads(made.body["reply"])
    assert redacted_reply["choices"][0]["message"]["content"] == "to\n[redacted:email]"
    assert redacted_reply["choices"][0]["logprobs"] is None
    assert (
        redacted_reply["choices"][0]["token_ids"]
        == redacted_reply["prompt_token_ids"]
        == redacted_reply["samples"]
        == []
    )
    assert (redacted_reply["id"], redacted_reply["model"], redacted_reply["usage"]) == (
        "chatcmpl-1",
        "calc@3",
        reply["usage"],
    )
    assert "jane" not in made.body["reply"] and "j@x" not in made.body["reply"]
    assert made.body["fingerprint"] == "ab@cd.ef"


@pytest.mark.parametrize("seed", range(20))
def test_a_secret_in_the_pieces_of_a_stream(seed: int) -> None:
    picked = random.Random(seed)
    secret = picked.choice(list(SECRETS))
    text = f"It is {secret}, that is it: {secret}"
    pieces, rest = [], text
    while rest:
        size = picked.randint(1, 5)
        pieces.append(rest[:size])
        rest = rest[size:]
    lines = [chunk(piece, token_ids=[7]) for piece in pieces]
    lines.append(': a comment\n\ndata: {"id": "x", "choices": [], "samples": [{"token_ids": [7]}]}')
    stream = "\n\n".join([*lines, "data: [DONE]"]) + "\n\n"
    said = {"role": "assistant", "content": text}
    made = all_kinds().apply(call(message=said, reply=stream))
    events = [line for line in made.body["reply"].split("\n") if line.startswith("data: {")]
    assert len(events) == len(pieces) + 1 and made.body["reply"].endswith("data: [DONE]\n\n")
    told = [json.loads(event.removeprefix("data: ")) for event in events]
    whole = "".join(t["choices"][0]["delta"]["content"] for t in told[:-1])
    assert whole == made.body["message"]["content"] != text
    assert secret not in whole and all(t["choices"][0]["token_ids"] == [] for t in told[:-1])
    assert told[-1]["samples"] == []


def test_a_stream_of_several_choices_is_looked_into_by_itself() -> None:
    def two(index: int, text: str) -> str:
        return "data: " + json.dumps({"choices": [{"index": index, "delta": {"content": text}}]})

    pieces = [two(0, "fine"), two(1, "jane@exa"), two(0, ", really"), two(1, "mple.com")]
    event = call(reply="\n\n".join(pieces), sampling={"n": 2})
    made = all_kinds().apply(event)
    assert made.body["redacted"] == [{"kind": "email", "count": 1}]
    assert "jane" not in made.body["reply"] and ", really" in made.body["reply"]


def test_other_apis_streams() -> None:
    responses: list[dict[str, Any]] = [
        {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "delta": "jane@"},
        {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "delta": "x.org"},
        {"type": "response.completed", "response": {"id": "resp_1", "instructions": "by j@x.org"}},
    ]
    anthropic: list[dict[str, Any]] = [
        {"type": "content_block_delta", "index": 0, "delta": {"partial_json": '{"to": "jane'}},
        {"type": "content_block_delta", "index": 0, "delta": {"partial_json": '@x.org"}'}},
        {"type": "content_block_delta", "index": 1, "delta": {"text": "done"}},
    ]
    for events in (responses, anthropic):
        stream = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
        made = all_kinds().apply(call(reply=stream, message={"content": "jane@x.org"}))
        assert "jane" not in made.body["reply"] and "j@x" not in made.body["reply"]
        for line in made.body["reply"].split("\n"):
            if line.startswith("data:"):
                json.loads(line.removeprefix("data:"))
    whole = {"content": [{"type": "tool_use", "id": "t", "input": {"j@x.org": {"id": "j@x.org"}}}]}
    made = all_kinds().apply(call(reply=json.dumps(whole)))
    assert "j@x" not in made.body["reply"]
    assert json.loads(made.body["reply"])["content"][0]["id"] == "t"


def test_own_patterns_and_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "our_privacy.py").write_text(
        "def names(text):\n    return text.replace('Jane', '[somebody]')\n"
        "def broken(text):\n    raise KeyError(text)\n"
        "def wrong(text):\n    return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = Redactor(["our_privacy:names"], {"customer": r"\bC-\d+\b"})
    made = own.apply(call(message={"role": "assistant", "content": "Jane is C-77, not XC-77"}))
    assert made.body["message"]["content"] == "[somebody] is [redacted:customer], not XC-77"
    assert made.body["redacted"] == [
        {"kind": "customer", "count": 1},
        {"kind": "names", "count": 1},
    ]
    event = call()
    assert own.apply(event) is event
    for name in ("broken", "wrong"):
        with pytest.raises(StoreError, match=f"our_privacy:{name}"):
            Redactor([f"our_privacy:{name}"], {}).apply(event)
    fields = Redactor([], {"field": "messages|content|role|arguments|reply|input"})
    assert ModelCall.model_validate(fields.apply(event).body).messages[0]["role"] == "system"


@pytest.mark.parametrize(
    ("kinds", "patterns", "word"),
    [
        (["emial"], {}, "'email'"),
        (["phone"], {}, "'phone'"),
        (["no_such_module_here:f"], {}, "no_such_module_here:f"),
        ([":"], {}, "':'"),
        ([], {"bad": "(unclosed"}, "bad = '\\(unclosed'"),
        ([], {"empty": "x*"}, "empty"),
        ([], {"email": "x"}, "email"),
        ([], {"a name": "x"}, "a name"),
    ],
)
def test_what_cannot_be_used_is_named(
    kinds: list[str], patterns: dict[str, str], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        Redactor(kinds, patterns)


def test_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Redactor.of(Config()) is None
    (tmp_path / "cray-agents.toml").write_text(
        'redact = ["email", "card"]\n[redact_patterns]\ncustomer = "C-\\\\d+"\n'
    )
    config = load_config({}, tmp_path)
    assert (config.redact, config.redact_patterns) == (["email", "card"], {"customer": r"C-\d+"})
    monkeypatch.setenv("CRAY_AGENTS_REDACT", "email  token")
    monkeypatch.setenv("CRAY_AGENTS_REDACT_PATTERNS", '{"customer": "K \\\\d+"}')
    config = load_config({}, tmp_path)
    assert (config.redact, config.redact_patterns) == (["email", "token"], {"customer": r"K \d+"})
    redactor = Redactor.of(config)
    assert redactor is not None
    made = redactor.apply(call(message={"role": "assistant", "content": "K 12 4111111111111111"}))
    assert made.body["message"]["content"] == "[redacted:customer] 4111111111111111"
    for wrong in ("K", '{"a": 1}'):
        monkeypatch.setenv("CRAY_AGENTS_REDACT_PATTERNS", wrong)
        with pytest.raises(ConfigError, match=r"(?i)redact_patterns"):
            load_config({}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    [
        "a", "4", "@", "a@", "@a.", "%40a.", "4444 ", "4111-", "sk-", "sk-a1", "eyJ",
        "eyJaaaaaaaaa.", "bearer ", "bearer\t\t\t", "api_key=", "api_key=a1",
        "-----BEGIN ", "-----BEGIN A ",
        "-----BEGIN PRIVATE KEY-----", "SG.aaaaaaaaaaaaaaaaaa", "\\n", "\\u0041", "xoxb-a", ".a-",
        "AKIA", "ghp_", "{", '{"a":', "[", "data: {", "\\u0040x.",
    ],
)  # fmt: skip
def test_no_text_takes_forever(piece: str) -> None:
    """A pattern that goes back over what it read would need days."""
    text = piece * (200_000 // len(piece))
    all_kinds().apply(call(message={"role": "assistant", "content": text}, reply=text))
    for _, substitute in Sensitive(frozenset(KINDS)).substitutes():
        substitute(text)
    all_kinds().apply(call(reply=text, sampling={"n": 2}, message={"content": "a@example.com"}))


def test_a_quick_no_is_never_wrong() -> None:
    picked = random.Random(7)
    known = Sensitive(frozenset(KINDS))
    letters = string.ascii_letters + string.digits + ' .,-_@"\n\\/=:'
    for _ in range(3000):
        around = ["".join(picked.choices(letters, k=picked.randint(0, 30))) for _ in range(2)]
        text = picked.choice(list(SECRETS)).join(around)
        found = sum(substitute(text)[1] for _, substitute in known.substitutes())
        assert not found or known.suspicious(text), text
