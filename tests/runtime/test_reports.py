"""Reports over HTTP: their citations, verified byte for byte; and views that pages are told."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.generation import Generation
from cray_agents.paths import Home
from cray_agents.promotion.paired_evidence import PairedEvidence, RunPair, entry_of
from cray_agents.promotion.sequential_test import PromotionTest
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.reports.markdown_nodes import nodes_of
from cray_agents.runtime.reports.report_records import Report
from tests.runtime.views.test_run_views import converse, model_with_tokenizer
from tests.support.scripted_gateway import Gateway, echo, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = 'a "quoted" word, ü and \N{SUN WITH FACE}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory = tmp_path_factory.mktemp("reports")
    model = model_with_tokenizer(directory / "model")
    async with served(directory, ScriptedEngine(echo), model=model, max_body=2**22) as gateway:
        await converse(gateway, "cited", ["one", TEXT, "three"])
        yield gateway


async def written(gateway: Gateway, text: str, name: str = "r") -> Any:
    status, answer = await gateway.call("PUT", f"/v1/reports/{name}", json={"text": text})
    assert status == 200, answer
    Report.model_validate(answer)
    return answer


async def verdicts(gateway: Gateway, *links: str) -> list[str]:
    """The error of each citation; "" where it holds."""
    answer = await written(gateway, "\n\n".join(f"[x]({link})" for link in links))
    assert len(answer["citations"]) == len(links)
    assert answer["broken"] == sum(not one["ok"] for one in answer["citations"])
    assert all(one["ok"] == (one["error"] == "") for one in answer["citations"])
    return [one["error"] for one in answer["citations"]]


async def test_a_quote_of_a_turn_holds_byte_for_byte(gateway: Gateway) -> None:
    right = TEXT.replace('"', '\\"')
    assert await verdicts(
        gateway,
        f'#/run/cited?t=1 "{right}"',
        '/#/run/cited?t=1 "quoted\\" word, ü"',
        "#/run/cited?t=2",
        "#/run/cited",
    ) == ["", "", "", ""]
    wrong = "no text of turn 1 has these words"
    assert (
        await verdicts(
            gateway,
            '#/run/cited?t=1 "Quoted"',
            '#/run/cited?t=1 "u\u0308 and"',  # the same letter in other bytes
            '#/run/cited?t=1 "one"',  # of the turn before
            '#/run/cited?t=1 "user"',  # a role, which nobody wrote
        )
        == [wrong] * 4
    )


async def test_a_quote_of_tokens_is_all_of_their_bytes(gateway: Gateway) -> None:
    (call,) = [c for c in gateway.calls("cited") if c.messages[-1]["content"] == TEXT]
    first = len(call.prompt_token_ids)
    assert bytes(call.token_ids[:3]) == b'a "'
    last = first + len(call.token_ids) - 1
    assert await verdicts(
        gateway,
        f'#/run/cited?t=1&tok={first} "a"',
        f"#/run/cited?t=1&tok={first}-{first + 2} 'a \"'",
        f"#/run/cited?t=1&tok={last}",
    ) == ["", "", ""]
    part, beyond, reverse = await verdicts(
        gateway,
        f'#/run/cited?t=1&tok={first}-{first + 2} "a"',
        f"#/run/cited?t=1&tok={last + 1}",
        "#/run/cited?t=1&tok=9-8",
    )
    assert part == "these tokens are 'a \"'"
    assert beyond == f"turn 1 has {last + 1} tokens, from 0 on"
    assert "as 88 or 88-90" in reverse


async def test_fields_of_records_are_compared(gateway: Gateway) -> None:
    home = Home(gateway.services.home.root)
    pair = {"task": "t", "tag": None, "candidate": 1.0, "incumbent": 0.0, "candidate_run": "a"}
    pairs = [RunPair.model_validate(pair | {"incumbent_run": "b"})]
    noted = PairedEvidence(
        candidate="calc@2", incumbent="calc@1", test=PromotionTest(), planned=1, pairs=pairs
    )
    path = home.loop("sums") / "journal" / f"{entry_of(3)}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(checksums.with_crc(noted.model_dump_json().encode()))
    record = Generation(
        generation=3,
        version="calc@1",
        runs=16,
        holdout_success=0.93103,
        holdout_tasks=5,
        accepted_runs=8,
        seconds={},
        wall=1.0,
    ).model_dump(mode="json")
    posted = await gateway.call("POST", "/v1/loops/sums/generations/3", json=record)
    assert posted[0] == 200
    assert (
        await verdicts(
            gateway,
            '#/run/cited "turns=3"',
            '#/generation/sums/3 "record.holdout_success=0.93"',
            '#/generation/sums/3?pair=1 "outcome=won"',
            "#/models?at=calc%401 'name=calc'",
        )
        == [""] * 4
    )
    found = await verdicts(
        gateway,
        '#/run/cited "turns=4"',
        '#/generation/sums/3 "record.holdout_success=0.94"',
        '#/generation/sums/3 "record.luck=1"',
        '#/generation/sums/3 "it won"',
        "#/generation/sums/4",
        '#/generation/sums/3?pair=2 "outcome=won"',
        "#/models?at=calc%407",
        "#/models?at=calc",
        "#/dataset/ds-none",
        "#/job/ft-none",
    )
    assert found[:4] == [
        "turns is '3'",
        "record.holdout_success is '0.93'",
        "the record has no field 'record.luck'",
        "quote a field and its value, as name=value, not 'it won'",
    ]
    assert found[4] == "loop 'sums' has no generation 4" and "1 pairs" in found[5]
    assert all(found[4:])


async def test_what_is_no_citation_or_names_nothing_that_can_be(gateway: Gateway) -> None:
    text = (
        "[a](https://elsewhere.test/x) [b](#/runs?q=x) ![c](https://elsewhere.test/i.png)"
        " [d](javascript:alert(1)) <script>x</script> [e](#here)"
    )
    answer = await written(gateway, text)
    assert answer["citations"] == []
    texts = json.dumps(answer["nodes"])
    assert "javascript:alert(1)" in texts and '"href": "javascript' not in texts
    assert "<script>" in texts and "i.png" not in texts
    found = await verdicts(
        gateway, "#/run/..%2f..%2fx", "#/run/none?t=0", "#/run/cited?t=x", "#/run/cited?t=99",
        "#/run/cited?tok=3", "#/generation/sums/x", "#/job/%2e%2e",
    )  # fmt: skip
    assert all(found) and "is no run's id" in found[0] and "name it with t" in found[4]


async def test_a_forgotten_run_breaks_what_quotes_it_and_damage_is_told(gateway: Gateway) -> None:
    await converse(gateway, "passing", ["secret words"])
    text = '# Of *it*\n\n[x](#/run/passing?t=0 "secret words")'
    assert (await written(gateway, text, "kept"))["broken"] == 0
    assert (await gateway.call("DELETE", "/v1/trajectories/passing"))[0] == 200
    status, answer = await gateway.call("GET", "/v1/reports/kept")
    assert (status, answer["broken"], answer["title"]) == (200, 1, "Of it")
    assert "passing" in answer["citations"][0]["error"]
    path = gateway.services.home.reports / "kept.json"
    path.write_bytes(path.read_bytes().replace(b"secret", b"Secret"))
    status, answer = await gateway.call("GET", "/v1/reports/kept")
    assert status == 422 and "damaged" in answer["error"]["message"]
    status, answer = await gateway.call("GET", "/v1/reports")
    assert [one["damaged"] for one in answer["data"] if one["id"] == "kept"] == [True]
    assert (await written(gateway, text, "kept"))["broken"] == 1  # the new text stands whole
    assert (await gateway.call("DELETE", "/v1/reports/kept"))[0] == 200
    assert (await gateway.call("GET", "/v1/reports/kept"))[0] == 404
    assert (await gateway.call("DELETE", "/v1/reports/kept"))[0] == 404


async def test_reports_are_listed_the_last_written_first(gateway: Gateway) -> None:
    for name in ("p1", "p2", "p3", "p1"):
        await written(gateway, f"## About {name}", name)
    status, answer = await gateway.call("GET", "/v1/reports?limit=2")
    assert status == 200 and answer["has_more"]
    assert [one["id"] for one in answer["data"]] == ["p1", "p3"]
    first = answer["data"][0]
    assert first["title"] == "About p1" and first["created"] < first["updated"]
    status, answer = await gateway.call("GET", "/v1/reports?limit=1&after=p3")
    assert [one["id"] for one in answer["data"]] == ["p2"]
    assert (await gateway.call("GET", "/v1/reports?after=none"))[0] == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "text"), ({"text": 1}, "text"), ({"text": "x" * 2**20 + "x"}, "text"),
     ({"text": "[a](#/run/b) " * 1001}, "text")],
    ids=["none", "number", "large", "links"],
)  # fmt: skip
async def test_bad_reports_are_refused(gateway: Gateway, body: Any, param: str) -> None:
    status, answer = await gateway.call("PUT", "/v1/reports/bad", json=body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert (await gateway.call("GET", "/v1/reports/bad"))[0] == 404
    assert (await gateway.call("PUT", "/v1/reports/..bad", json={"text": "x"}))[0] == 404


async def test_text_of_any_depth_is_read() -> None:
    for text in (">" * 5000 + "x", "[" * 5000, "*" * 5000 + "a", "- " * 3000 + "x", "`" * 4999):
        json.dumps([part.model_dump(exclude_defaults=True) for part in nodes_of(text)])


async def events(gateway: Gateway, query: str, ready: asyncio.Event, wanted: int) -> list[str]:
    """So many blocks of the stream that are no comments."""
    blocks: list[str] = []
    async with gateway.http.get(f"{gateway.url}/v1/events?{query}") as answer:
        text = ""
        async for piece in answer.content.iter_any():
            ready.set()
            text += piece.decode()
            blocks = [b for b in text.split("\n\n") if b and b[0] != ":"]
            if len(blocks) >= wanted:
                break
    return blocks


async def test_pages_of_the_caller_are_told_what_to_show(gateway: Gateway) -> None:
    view = {
        "url": "#/run/cited?t=1",
        "highlight": [
            {"turn": 1, "quote": "quoted", "reason": "the word"},
            {"turn": 1, "quote": "absent"},
        ],
    }
    ready, scripts = asyncio.Event(), asyncio.Event()
    page = asyncio.create_task(events(gateway, "page=true", ready, 1))
    script = asyncio.create_task(events(gateway, "page=false", scripts, 1))
    await asyncio.wait_for(asyncio.gather(ready.wait(), scripts.wait()), 120)
    status, answer = await gateway.call("POST", "/v1/view", json=view)
    assert (status, answer["pages"]) == (200, 1)
    assert answer["highlight"] == [{"turn": 1, "ok": True}, {"turn": 1, "ok": False}]
    (block,) = await asyncio.wait_for(page, 120)
    name, data = block.split("\n")
    assert name == "event: view"
    told = json.loads(data.removeprefix("data: "))
    assert (told["url"], told["run"]) == ("#/run/cited?t=1", "cited")
    assert told["highlight"][0] == {"turn": 1, "quote": "quoted", "reason": "the word"}
    await written(gateway, "news", "told")
    (block,) = await asyncio.wait_for(script, 120)  # a script hears of changes alone
    assert '"kind":"report","id":"told"' in block


async def test_a_view_reaches_no_page_of_another_key(tmp_path: Path) -> None:
    keys = Keys(Home(tmp_path / "home"))
    secrets = {name: keys.create(name, Role.train)[1] for name in ("ann", "bob")}
    as_ann, as_bob = ({"authorization": f"Bearer {secret}"} for secret in secrets.values())
    async with served(tmp_path, api_keys="required") as gateway:
        path = f"{gateway.url}/v1/events?page=true"
        async with gateway.http.get(path, headers=as_ann) as stream:
            await stream.content.readline()  # it is open
            for headers, pages in ((as_bob, 0), (as_ann, 1)):
                sent = {"json": {"url": "#/overview"}, "headers": headers}
                status, answer = await gateway.call("POST", "/v1/view", **sent)
                assert (status, answer["pages"]) == (200, pages)
            text = {"json": {"text": "x"}, "headers": as_ann}
            assert (await gateway.call("PUT", "/v1/reports/r", **text))[1]["author"] == "ann"


@pytest.mark.parametrize(
    "body",
    [
        {"url": "https://elsewhere.test/"},
        {"url": "javascript:alert(1)"},
        {"url": "#/overview", "highlight": [{"turn": 0, "quote": "x"}]},
        {"url": "#/run/cited", "highlight": [{"turn": 0, "quote": ""}]},
        {"url": "#/run/cited", "highlight": [{"turn": -1, "quote": "x"}]},
        {"url": "#/run/cited", "high": []},
        {},
    ],
)
async def test_bad_views_are_refused(gateway: Gateway, body: Any) -> None:
    status, answer = await gateway.call("POST", "/v1/view", json=body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
